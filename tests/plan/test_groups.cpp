// Groups for batches of documents of many lengths: what must hold of every division, and its balance.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "configs/error.h"
#include "coordinator/plan/groups.h"

namespace oomb::plan {
namespace {

using Lengths = std::vector<std::int64_t>;

// Of the shape of top-k training: linear layers, the own chunk's square, and at most 64 past pages of 128 tokens.
double topk_cost(std::int64_t tokens, std::int64_t past) {
  const auto n = static_cast<double>(tokens);
  const double keys = static_cast<double>(std::min<std::int64_t>(past, 64 * 128));
  return n * (1.0 + n / 40'000 + keys / 20'000);
}
// Exact attention: cost grows with the past.
double dense_cost(std::int64_t tokens, std::int64_t past) {
  const auto n = static_cast<double>(tokens);
  return n * (1.0 + n / 40'000 + static_cast<double>(past) / 20'000);
}

// Everything but balance; also forms each worker's work anew from where documents were put.
void check(const GroupPlan& plan, const Lengths& lengths, const GroupRules& rules, const ChunkCost& cost) {
  std::set<std::int64_t> seen;
  std::vector<double> work(static_cast<std::size_t>(rules.workers));
  std::int64_t next_worker = 0;
  for (const Group& group : plan.groups) {
    ASSERT_EQ(group.first_worker, next_worker);
    ASSERT_GE(group.workers, 1);
    ASSERT_LE(group.workers, rules.max_group_workers);
    next_worker += group.workers;
    for (const PackedSequence& sequence : group.sequences) {
      ASSERT_GE(sequence.offset, 0);
      ASSERT_LT(sequence.offset, group.workers);
      ASSERT_TRUE(rules.max_sequence == 0 || sequence.tokens <= rules.max_sequence);
      std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> chunks;  // tokens, past
      std::int64_t end = 0;
      for (const PackedDocument& d : sequence.documents) {
        ASSERT_TRUE(seen.insert(d.document).second) << "document twice";
        const std::int64_t length = lengths[static_cast<std::size_t>(d.document)];
        ASSERT_GE(d.begin, end);
        ASSERT_LT(d.begin - end, rules.page_tokens) << "more padding than to the next page";
        end = d.begin + length;
        const std::int64_t first = d.begin / rules.chunk_tokens, last = (end - 1) / rules.chunk_tokens;
        ASSERT_TRUE(last == first || d.begin % rules.page_tokens == 0) << "a page that is read would mix documents";
        for (std::int64_t s = first; s <= last; ++s) {
          auto& [tokens, past] = chunks[s];
          const std::int64_t begin_here = std::max(d.begin, s * rules.chunk_tokens);
          tokens += std::min(end, (s + 1) * rules.chunk_tokens) - begin_here;
          if (begin_here > d.begin) {
            ASSERT_EQ(past, 0) << "two documents cross one border";
            past = begin_here - d.begin;
          }
        }
      }
      ASSERT_EQ(end, sequence.tokens);
      for (const auto& [s, chunk] : chunks) {
        work[static_cast<std::size_t>(group.first_worker + (s + sequence.offset) % group.workers)] +=
            cost(chunk.first, chunk.second);
      }
    }
  }
  ASSERT_EQ(next_worker, rules.workers);
  ASSERT_EQ(seen.size(), lengths.size()) << "a document was left out";
  ASSERT_EQ(plan.work.size(), work.size());
  for (std::size_t i = 0; i < work.size(); ++i) ASSERT_NEAR(plan.work[i], work[i], 1e-9 * (1 + work[i]));
}

TEST(Groups, ThousandRandomBatchesAreBalanced) {
  std::mt19937_64 random(20261201);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53;
  };
  double worst = 0;
  for (int round = 0; round < 1000; ++round) {
    GroupRules rules;
    rules.workers = 1 + static_cast<std::int64_t>(random() % 64);
    rules.max_sequence = random() % 2 == 0 ? 0 : std::int64_t{4} << 20;
    // Enough for 20 chunks a worker: balance ends at the size of a chunk.
    Lengths lengths;
    for (std::int64_t sum = 0; sum < 20 * rules.workers * rules.chunk_tokens;) {
      lengths.push_back(static_cast<std::int64_t>(1024 * std::pow(1024.0, uniform(0, 1))));  // 1K to 1M
      sum += lengths.back();
    }
    const ChunkCost cost = round % 4 == 3 ? dense_cost : topk_cost;
    const GroupPlan plan = plan_groups(lengths, rules, cost);
    ASSERT_NO_FATAL_FAILURE(check(plan, lengths, rules, cost)) << "round " << round;
    ASSERT_LE(plan.max_over_mean(), 1.1) << "round " << round << ", " << rules.workers << " workers, " << lengths.size()
                                         << " documents";
    worst = std::max(worst, plan.max_over_mean());
  }
  RecordProperty("worst_max_over_mean", std::to_string(worst));
}

TEST(Groups, OneLongManyShort) {
  Lengths lengths(300, 2'000);
  lengths.push_back(1'000'000);
  GroupRules rules;
  rules.workers = 8;
  const GroupPlan plan = plan_groups(lengths, rules, topk_cost);
  check(plan, lengths, rules, topk_cost);
  EXPECT_LE(plan.max_over_mean(), 1.1);
}

TEST(Groups, EqualShortDocumentsStayApart) {
  // Nothing has to be exchanged: as many groups as workers.
  const GroupPlan plan = plan_groups(Lengths(64, 40'000), {.workers = 16}, topk_cost);
  EXPECT_EQ(plan.groups.size(), 16u);
  EXPECT_DOUBLE_EQ(plan.max_over_mean(), 1);
}

TEST(Groups, OneLongDocumentIsSpread) {
  const Lengths lengths = {1'000'000};
  const GroupPlan plan = plan_groups(lengths, {.workers = 7}, topk_cost);
  check(plan, lengths, {.workers = 7}, topk_cost);
  EXPECT_EQ(plan.groups.size(), 1u);
  EXPECT_LE(plan.max_over_mean(), 1.1);
}

TEST(Groups, SmallAndOddBatches) {
  for (const std::int64_t workers : {1, 2, 3, 5, 64}) {
    for (const Lengths& lengths : {Lengths{1}, Lengths{4096}, Lengths{4097, 1, 127, 129}, Lengths{1, 2, 3, 5, 8}}) {
      for (const std::int64_t chunk : {128, 384, 4096}) {
        const GroupRules rules{.workers = workers, .chunk_tokens = chunk};
        ASSERT_NO_FATAL_FAILURE(check(plan_groups(lengths, rules, topk_cost), lengths, rules, topk_cost));
      }
    }
  }
}

TEST(Groups, LargeGroupsAreDivided) {
  const GroupPlan plan = plan_groups(Lengths(16, 1 << 20), {.workers = 1024}, topk_cost);
  EXPECT_EQ(plan.groups.size(), 16u);
  EXPECT_EQ(plan.groups[0].workers, 64);
}

TEST(Groups, BadBatches) {
  EXPECT_THROW(plan_groups(Lengths{}, {}, topk_cost), InputError);
  EXPECT_THROW(plan_groups(Lengths{5, 0}, {}, topk_cost), InputError);
  EXPECT_THROW(plan_groups(Lengths{100}, {.workers = 0}, topk_cost), InputError);
  try {
    plan_groups(Lengths{5, 11}, {.max_sequence = 10}, topk_cost);
    ADD_FAILURE() << "no error";
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "document 1 has 11 tokens; allowed: 1 to 10");
  }
}

}  // namespace
}  // namespace oomb::plan
