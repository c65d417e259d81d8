// What a model's state, its pages and their gradients take, against figures measured on a GPU and against enumeration.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "worker/sizes/model_sizes.h"
#include "worker/sizes/page_demand.h"

namespace oomb::sizes {
namespace {

constexpr double kGiB = 1 << 30;

model::ModelConfig qwen() { return model::read_hf_config(OOMB_SOURCE_FOLDER "/configs/models/qwen2.5-7b.json"); }

RunConfig run_of(std::int64_t length, const std::vector<std::string>& settings = {}) {
  std::vector<std::string> all = {"sequence.length=" + std::to_string(length), "sequence.chunk=4096",
                                  "train.compute_dtype=bf16"};
  all.insert(all.end(), settings.begin(), settings.end());
  return parse_run_config("model: {config: m.json}\ndata: {kind: copy}\n", "run.yaml", "/base", all);
}
ChunkGrid grid_of(const RunConfig& c) { return {c.sequence.length, c.sequence.chunk, c.attention.page_tokens}; }

TEST(Sizes, StateOfQwen7B) {
  const RunConfig masters = run_of(4096);
  const StateBytes all = state_bytes(qwen(), masters, 1);
  EXPECT_EQ(all.weights, 2 * 7'615'616'512);
  EXPECT_NEAR(static_cast<double>(all.weights) / kGiB, 14.2, 0.05);
  EXPECT_NEAR(static_cast<double>(all.gradients) / kGiB, 28.4, 0.05);
  // 18 bytes a parameter, as measured runs had it.
  EXPECT_EQ(all.weights + all.gradients + all.masters + all.moments, 18 * 7'615'616'512);

  const RunConfig small = run_of(4096, {"train.optimizer_state=int8", "train.master_weights=stochastic_rounding"});
  const StateBytes bytes = state_bytes(qwen(), small, 1);
  EXPECT_EQ(bytes.masters, 0);
  // 8 + 1/32 bytes a parameter.
  EXPECT_NEAR(static_cast<double>(bytes.weights + bytes.gradients + bytes.moments) / 7'615'616'512, 8 + 1.0 / 32, 1e-6);

  const StateBytes shard = state_bytes(qwen(), masters, 7);
  EXPECT_EQ(shard.weights, all.weights);
  EXPECT_EQ(shard.gradients, all.gradients);
  EXPECT_EQ(shard.moments, 8 * ((7'615'616'512 + 6) / 7));

  const RunConfig fp64 = run_of(4096, {"train.compute_dtype=fp64"});
  EXPECT_EQ(state_bytes(qwen(), fp64, 1).masters, 0) << "weights are their own masters";
  EXPECT_EQ(state_bytes(qwen(), fp64, 1).moments, 16 * 7'615'616'512);
}

TEST(Sizes, PagesOfQwen7B) {
  const PageBytes bytes = page_bytes(qwen(), run_of(1 << 20));
  EXPECT_EQ(bytes.home, 256 << 10);
  EXPECT_EQ(bytes.gradient, 512 << 10);
  EXPECT_EQ(bytes.mean, 4 * 128 * 2);
  EXPECT_EQ(page_bytes(qwen(), run_of(1 << 20, {"pages.grad_dtype=bf16"})).gradient, 256 << 10);
  EXPECT_EQ(page_bytes(qwen(), run_of(1 << 20, {"pages.dtype=fp8"})).home, (128 << 10) + 2 * 4 * 4);
  // 57,344 bytes a token: 56 GiB at 1M, less the last chunk, which nobody reads.
  const RunConfig million = run_of(1 << 20);
  const PageDemand demand = page_demand(million, grid_of(million), 28, 1, bytes);
  EXPECT_EQ(demand.home_slots * bytes.home, std::int64_t{57'344} * ((1 << 20) - 4096));
  // 2.2 MiB of means for 10,000 tokens.
  EXPECT_NEAR(static_cast<double>(28 * bytes.mean) * 10'000 / 128 / (1 << 20), 2.14, 0.01);
  EXPECT_EQ(selection_bytes(million), 32 * 64 * 4);
  EXPECT_EQ(selection_bytes(run_of(1 << 20, {"attention.kind=dense"})), 0);
}

TEST(Sizes, UnionsAsMeasured) {
  struct Case {
    std::int64_t length, chunk;
    double mean;
  };
  for (const Case& c : {Case{65'536, 4096, 233}, {131'072, 8192, 456}, {262'144, 4096, 657}, {1 << 20, 4096, 1129}}) {
    const RunConfig run = run_of(c.length, {"sequence.chunk=" + std::to_string(c.chunk)});
    const ChunkGrid grid = grid_of(run);
    double sum = 0;
    for (std::int64_t s = 0; s < grid.num_chunks(); ++s)
      sum += expected_union(run, static_cast<double>(grid.first_page_of(s)));
    EXPECT_NEAR(sum / static_cast<double>(grid.num_chunks()) / c.mean, 1, 0.05) << c.length;
  }
}

TEST(Sizes, UnionsKeepTheirBounds) {
  for (const auto& settings : {std::vector<std::string>{},
                               {"attention.chunk_pages=256"},
                               {"attention.kind=dense"},
                               {"attention.budget_pages=0"},
                               {"attention.query_tile=4096"}}) {
    const RunConfig run = run_of(1 << 20, settings);
    double before = 0;
    for (const std::int64_t past : {0, 1, 63, 64, 65, 257, 4096, 32'768, 1'000'003}) {
      const double expected = expected_union(run, static_cast<double>(past));
      EXPECT_LE(expected, static_cast<double>(most_union(run, past)) + 1e-6);
      EXPECT_LE(most_union(run, past), past);
      EXPECT_GE(expected, before - 1e-9) << "more past, fewer pages";
      before = expected;
    }
  }
  EXPECT_EQ(expected_union(run_of(4096, {"attention.kind=dense"}), 777), 777);
  EXPECT_EQ(expected_union(run_of(4096, {"attention.chunk_pages=256"}), 32'768), 256);
}

// Goes through pass 2 with chunks that choose their expected number of pages at random.
struct Enumerated {
  double peak_bytes = 0;
};
Enumerated enumerate(const RunConfig& run, const ChunkGrid& grid, std::int64_t layers, const PageBytes& bytes,
                     std::mt19937_64& random) {
  const std::int64_t per_chunk = grid.chunk_tokens / grid.page_tokens;
  Enumerated result;
  std::vector<std::set<std::int64_t>> slots(static_cast<std::size_t>(layers));
  for (std::int64_t s = grid.num_chunks() - 1; s > 0; --s) {
    std::vector<std::int64_t> past(static_cast<std::size_t>(grid.first_page_of(s)));
    std::iota(past.begin(), past.end(), std::int64_t{0});
    const auto chosen = std::llround(expected_union(run, static_cast<double>(past.size())));
    double live = 0;
    for (auto& of_layer : slots) {
      std::shuffle(past.begin(), past.end(), random);
      of_layer.insert(past.begin(), past.begin() + chosen);
      of_layer.erase(of_layer.lower_bound(s * per_chunk), of_layer.end());  // freed with their chunk
      live += static_cast<double>(of_layer.size()) * static_cast<double>(bytes.gradient);
    }
    live += static_cast<double>(layers * s * per_chunk * bytes.home);
    result.peak_bytes = std::max(result.peak_bytes, live);
  }
  return result;
}

TEST(Sizes, PageDemandAgainstEnumeration) {
  std::mt19937_64 random(7);
  for (const auto& settings : {std::vector<std::string>{"attention.budget_pages=3"},
                               {"attention.budget_pages=2", "attention.chunk_pages=5"},
                               {"attention.kind=dense"},
                               {"attention.budget_pages=0"}}) {
    std::vector<std::string> all = {"sequence.chunk=40", "attention.page_tokens=8", "train.compute_dtype=fp32"};
    all.insert(all.end(), settings.begin(), settings.end());
    const RunConfig run = run_of(40 * 47 - 13, all);
    const ChunkGrid grid = grid_of(run);
    const PageBytes bytes{1000, 3000, 10};
    const PageDemand demand = page_demand(run, grid, 6, 1, bytes);
    const Enumerated seen = enumerate(run, grid, 6, bytes, random);
    EXPECT_NEAR(static_cast<double>(demand.bytes_expected) / seen.peak_bytes, 1, 0.02) << settings[0];
    EXPECT_GE(demand.bytes_most, demand.bytes_expected);
    EXPECT_GE(static_cast<double>(demand.bytes_most), seen.peak_bytes * 0.999);
  }
}

TEST(Sizes, DenseNeedsAGradientSlotForEveryHome) {
  const RunConfig run = run_of(1 << 18, {"attention.kind=dense"});
  const PageDemand demand = page_demand(run, grid_of(run), 28, 1, page_bytes(qwen(), run));
  EXPECT_EQ(demand.gradient_slots_expected, demand.home_slots);
  EXPECT_EQ(demand.bytes_most, demand.bytes_expected);
}

TEST(Sizes, WorkersShareThePages) {
  const RunConfig run = run_of(1 << 20);
  const PageBytes bytes = page_bytes(qwen(), run);
  const PageDemand one = page_demand(run, grid_of(run), 28, 1, bytes);
  const PageDemand five = page_demand(run, grid_of(run), 28, 5, bytes);
  EXPECT_EQ(one.home_slots, 255 * 32 * 28);
  EXPECT_EQ(five.home_slots, 51 * 32 * 28);
  EXPECT_NEAR(static_cast<double>(one.bytes_expected) / static_cast<double>(five.bytes_expected), 5, 0.1);
}

TEST(Sizes, OneChunkHasNoPages) {
  for (const std::int64_t length : {1, 4095, 4096}) {
    const RunConfig run = run_of(length);
    const PageDemand demand = page_demand(run, grid_of(run), 28, 3, page_bytes(qwen(), run));
    EXPECT_EQ(demand.home_slots + demand.bytes_expected + demand.bytes_most, 0) << length;
  }
}

}  // namespace
}  // namespace oomb::sizes
