// The same sequence under networks that delay, reorder and repeat as they like: the result is that of one worker, to
// the bit the same for every schedule, and no wait lasts.
#include <gtest/gtest.h>

#include "tests/cluster/group.h"

namespace oomb::test {
namespace {

struct Case {
  std::string name;
  PipelineOptions options;
  int64_t num_tokens;
  int num_workers;
};

std::vector<Case> cases() {
  PipelineOptions previous = topk_options(8, 4, 4, 2);
  previous.selection.votes = attention::Votes::previous_tile;
  return {{"dense", dense_options(4, 2, 2), 21, 3},   {"dense, two workers", dense_options(4, 2, 2), 17, 2},
          {"top-k", topk_options(8, 2, 4, 2), 45, 4}, {"two-level", topk_options(8, 2, 4, 2, 4), 47, 3},
          {"previous tile", previous, 41, 4},         {"a worker without a chunk", topk_options(8, 2, 4, 1), 15, 3}};
}

void expect_same_bits(const GroupResult& a, const GroupResult& b, const std::string& what) {
  ASSERT_EQ(a.grads.size(), b.grads.size()) << what;
  for (const auto& [name, grad] : a.grads) EXPECT_TRUE(at::equal(grad, b.grads.at(name))) << what << ", " << name;
}

TEST(Schedules, EveryOrderOfMessagesGivesTheSameResult) {
  const auto config = small_config(2, 1, false, 2);
  for (const Case& c : cases()) {
    const auto ids = random_ids(c.num_tokens, config.vocab_size, 11);
    const auto labels = shifted_labels(ids);
    const GroupResult alone = run_alone(config, c.options, ids, labels);
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      const std::string what = c.name + ", seed " + std::to_string(seed);
      GroupOptions group;
      group.network.num_workers = c.num_workers;
      group.network.seed = seed;
      group.network.max_delay_us = seed % 3 == 0 ? 400 : 60;
      group.network.slow_rank = static_cast<int>(seed % 5) - 1;
      group.network.duplicate_per_mille = seed % 2 == 0 ? 200 : 0;
      group.num_sequences = 2;
      group.cache_bytes = seed % 4 == 0 ? 0 : int64_t{1} << 20;
      const GroupResult together = run_group(config, c.options, ids, labels, group);
      expect_same(together, alone, what, 2);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Sums of gradients have an order of their own: two schedules, the same bits on every worker.
TEST(Schedules, BitsDoNotDependOnTheOrderOfArrival) {
  const auto config = small_config(2, 1, false, 2);
  const auto options = topk_options(8, 2, 4, 3);
  const auto ids = random_ids(75, config.vocab_size, 11);
  const auto labels = shifted_labels(ids);
  std::vector<GroupResult> results;
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    GroupOptions group;
    group.network.num_workers = 4;
    group.network.seed = seed;
    group.network.max_delay_us = 300;
    results.push_back(run_group(config, options, ids, labels, group));
    expect_same_bits(results.back(), results.front(), "seed " + std::to_string(seed));
  }
}

// A worker that dies: the others say which, within the network's time.
TEST(Schedules, ALostWorkerIsNamed) {
  const auto config = small_config(2, 1, false, 2);
  const auto options = dense_options(4, 2, 2);
  const auto ids = random_ids(43, config.vocab_size, 11);
  for (const int64_t deliveries : {5, 40, 90}) {
    GroupOptions group;
    group.network.num_workers = 3;
    group.network.lost_seconds = 0.2;
    group.lose_rank = 1;
    group.lose_after = deliveries;
    const GroupResult r = run_group(config, options, ids, shifted_labels(ids), group);
    ASSERT_EQ(r.errors.size(), 3u) << "after " << deliveries << " deliveries";
    for (const std::string& error : r.errors) {
      if (error.starts_with("worker 1:")) continue;
      EXPECT_NE(error.find(": worker 1 was lost"), std::string::npos) << error;
    }
  }
}

}  // namespace
}  // namespace oomb::test
