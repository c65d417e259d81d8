// Several workers train a sequence as one does: double precision, the sum of the workers' gradients against those of
// one worker, the same selections, and nothing read that is not there.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/cluster/group.h"

namespace oomb::test {
namespace {

GroupOptions workers(int count) {
  GroupOptions group;
  group.network.num_workers = count;
  return group;
}

std::string name_of(const PipelineOptions& o, int64_t n, int num_workers) {
  const auto& s = o.selection;
  std::string text = "N=" + std::to_string(n) + " C=" + std::to_string(o.chunk_tokens) +
                     " P=" + std::to_string(s.page_tokens) + " W=" + std::to_string(num_workers);
  if (s.dense) return text + " dense";
  return text + " B=" + std::to_string(s.budget_pages) + " M=" + std::to_string(s.chunk_pages);
}

// Runs the sequence alone and with each number of workers; returns the worst difference of a gradient.
double compare(const PipelineOptions& options, int64_t n, const std::vector<int>& counts,
               const model::ModelConfig& config = small_config(), int64_t cache_bytes = int64_t{1} << 30) {
  const auto ids = random_ids(n, config.vocab_size, 77 + static_cast<uint64_t>(n));
  const auto labels = shifted_labels(ids, /*with_holes=*/n > 2);
  const GroupResult alone = run_alone(config, options, ids, labels);
  double worst = 0;
  for (const int count : counts) {
    GroupOptions group = workers(count);
    group.cache_bytes = cache_bytes;
    group.step = count + n;  // the first chunk is not always rank 0's
    const GroupResult together = run_group(config, options, ids, labels, group);
    worst = std::max(worst, expect_same(together, alone, name_of(options, n, count)));
  }
  return worst;
}

TEST(ContextParallel, Dense) {
  for (const int64_t n : {2, 3, 4, 5, 8, 15, 16, 17, 43, 61}) compare(dense_options(8, 4, 4), n, {1, 2, 3, 4});
  compare(dense_options(12, 3, 6), 71, {2, 3});
  compare(dense_options(16, 1, 16), 50, {2, 3});
  compare(dense_options(7, 7, 7), 36, {2, 5}, small_config(3, 1, true));
}

// ring-flash-attention 39, EasyContext 47: chunks that do not come out even, and more workers than chunks.
TEST(ContextParallel, ChunksThatWorkersDoNotDivide) {
  compare(dense_options(8, 4, 4), 5 * 8, {4});
  compare(dense_options(8, 4, 4), 9 * 8 - 3, {8});
  compare(topk_options(8, 2, 4, 3), 9 * 8, {8});
  compare(dense_options(8, 4, 4), 3 * 8 - 1, {8});
  compare(topk_options(8, 4, 4, 1), 3, {4});
}

TEST(ContextParallel, SelectedPages) {
  for (const int64_t n : {61, 96, 97}) {
    compare(topk_options(16, 4, 4, 2), n, {1, 2, 3, 4});
    compare(topk_options(16, 4, 8, 3), n, {2, 3});
    compare(topk_options(16, 4, 4, 0), n, {3});
    compare(topk_options(16, 2, 4, 2, 5), n, {2, 3, 4});
    PipelineOptions forced = topk_options(16, 4, 4, 3);
    forced.selection.sink_pages = 1;
    forced.selection.recent_pages = 1;
    compare(forced, n, {2, 3});
    PipelineOptions previous = topk_options(16, 4, 4, 2);
    previous.selection.votes = attention::Votes::previous_tile;
    compare(previous, n, {2, 3, 4});
  }
}

// The transfer memory changes what is fetched how often, not what comes out.
TEST(ContextParallel, SmallCaches) {
  for (const int64_t slots : {0, 3, 5, 9, 14}) {
    const int64_t page_bytes = (2 * 2 * 4 * 6 * 8 + 255) / 256 * 256;
    compare(dense_options(16, 4, 4), 96, {3}, small_config(), slots * page_bytes);
    compare(topk_options(16, 4, 4, 3), 96, {2, 3}, small_config(), slots * page_bytes);
  }
}

TEST(ContextParallel, ActivationsThatAreComputedAgain) {
  for (const KeptActivations level : kAllLevels) {
    for (const auto& [whole, kept] : {std::pair<int64_t, int64_t>{1, 1}, {0, 2}, {9, 9}}) {
      PipelineOptions options = topk_options(16, 4, 4, 2);
      options.activations = {level, whole, kept};
      compare(options, 123, {2, 3});
    }
  }
}

TEST(ContextParallel, SequencesOneAfterAnother) {
  const auto config = small_config();
  const auto options = topk_options(8, 4, 4, 2);
  const auto ids = random_ids(53, config.vocab_size, 3);
  const auto labels = shifted_labels(ids);
  const GroupResult alone = run_alone(config, options, ids, labels);
  GroupOptions group = workers(3);
  group.num_sequences = 4;
  expect_same(run_group(config, options, ids, labels, group), alone, "four sequences", 4);
}

TEST(ContextParallel, Evaluation) {
  const auto config = small_config();
  for (const auto& options : {dense_options(8, 4, 4), topk_options(8, 4, 4, 2), topk_options(8, 2, 4, 1, 3)}) {
    for (const int64_t n : {3, 53, 64}) {
      const auto ids = random_ids(n, config.vocab_size, 3);
      const auto labels = shifted_labels(ids);
      const GroupResult alone = run_alone(config, options, ids, labels, /*evaluate=*/true);
      for (const int count : {2, 3}) {
        GroupOptions group = workers(count);
        group.evaluate = true;
        group.num_sequences = 2;
        expect_same(run_group(config, options, ids, labels, group), alone, name_of(options, n, count), 2);
      }
    }
  }
}

TEST(ContextParallel, LengthsThatNothingDivides) {
  const auto config = small_config(2, 1, false, 1);
  std::printf("N=2999 dense: worst difference of a gradient %.2e\n",
              compare(dense_options(512, 64, 64), 2999, {2, 4}, config));
  std::printf("N=2999 top-k: %.2e\n", compare(topk_options(256, 16, 32, 5), 2999, {1, 2, 3, 4}, config));
  std::printf("N=2999 two-level: %.2e\n", compare(topk_options(256, 16, 32, 5, 9), 2999, {3}, config));
}

TEST(ContextParallel, OneTokenMoreThan32768) {
  const auto config = small_config(2, 1, false, 1);
  std::printf("N=32769: %.2e\n", compare(topk_options(4096, 128, 128, 4), 32769, {3}, config));
}

// Two-level selection bounds what one chunk moves for one layer, however long the sequence is; without it the union
// over tiles grows.
TEST(ContextParallel, TwoLevelSelectionBoundsTheTraffic) {
  const auto config = small_config(2, 1, false, 2);
  const int64_t n = 1500, most = 6;
  const auto ids = random_ids(n, config.vocab_size, 9);
  const auto labels = shifted_labels(ids);
  GroupOptions group = workers(3);
  const auto most_moved = [&](int64_t chunk_pages) {
    const GroupResult r = run_group(config, topk_options(64, 4, 4, 4, chunk_pages), ids, labels, group);
    for (const std::string& error : r.errors) ADD_FAILURE() << error;
    int64_t pages = 0;
    for (const auto& ledger : r.ledgers) pages = std::max(pages, ledger.most_pages_per_chunk);
    return pages;
  };
  EXPECT_LE(most_moved(most), most);
  EXPECT_GT(most_moved(0), 2 * most);
}

// Each page and each sum of gradients moves once per chunk and layer, and both ends count the same.
TEST(ContextParallel, CountersAgree) {
  const auto config = small_config();
  const auto options = dense_options(8, 4, 4);
  const int64_t chunks = 6, pages_per_chunk = 2;
  const auto ids = random_ids(chunks * 8, config.vocab_size, 9);
  const GroupResult r = run_group(config, options, ids, shifted_labels(ids), workers(2));
  for (const std::string& error : r.errors) ADD_FAILURE() << error;
  cluster::ExchangeCounts sum;
  for (const auto& ledger : r.ledgers) sum += ledger.total();
  // Chunk s reads the pages of s/2 (rounded up) chunks of the other worker, at each layer; the cache keeps them.
  int64_t remote = 0, distinct = 0;
  for (int64_t s = 0; s < chunks; ++s) {
    remote += (s + 1) / 2 * pages_per_chunk * config.num_layers;
    distinct += s + 1 < chunks ? pages_per_chunk * config.num_layers : 0;
  }
  EXPECT_EQ(sum.contributions_sent, remote);
  EXPECT_EQ(sum.contributions_fetched, remote);
  EXPECT_EQ(sum.pages_fetched, distinct);
  EXPECT_EQ(sum.means_received, (chunks - 1) * config.num_layers);
}

}  // namespace
}  // namespace oomb::test
