#include "worker/sizes/page_demand.h"

#include <algorithm>
#include <cmath>

namespace oomb::sizes {
namespace {

constexpr double kIndependentTiles = 0.70;
// Chunks looked at one by one; of more, every k-th stands for k.
constexpr std::int64_t kExactChunks = 1 << 15;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool dense(const RunConfig& config) { return config.attention.kind == AttentionKind::kDense; }

std::int64_t tiles_of_chunk(const RunConfig& config) {
  return ceil_div(config.sequence.chunk, query_tile(config.attention));
}

}  // namespace

double expected_union(const RunConfig& config, double past) {
  const auto budget = static_cast<double>(config.attention.budget_pages);
  if (dense(config) || past <= budget) return past;
  const double tiles = std::max(kIndependentTiles * static_cast<double>(tiles_of_chunk(config)), 1.0);
  const double pages = past * (1 - std::pow(1 - budget / past, tiles));
  const auto limit = static_cast<double>(config.attention.chunk_pages);
  return limit > 0 ? std::min(pages, limit) : pages;
}

std::int64_t most_union(const RunConfig& config, std::int64_t past) {
  if (dense(config)) return past;
  const std::int64_t limit = config.attention.chunk_pages, tiles = tiles_of_chunk(config);
  return std::min(past, limit > 0 ? limit : tiles * config.attention.budget_pages);
}

PageDemand page_demand(const RunConfig& config, const ChunkGrid& grid, std::int64_t layers, std::int64_t workers,
                       const PageBytes& bytes) {
  const std::int64_t chunks = grid.num_chunks(), pages_of_chunk = grid.chunk_tokens / grid.page_tokens;
  // Of the first s chunks, those that the worker with most of them owns.
  const auto owned = [&](std::int64_t s) { return layers * pages_of_chunk * ceil_div(s, workers); };
  PageDemand demand;
  demand.home_slots = owned(chunks - 1);
  demand.bytes_expected = demand.bytes_most = demand.home_slots * bytes.home;
  double untouched_log = 0;
  std::int64_t selected = 0;  // bound on the pages of one layer that chunks from s on select
  const std::int64_t stride = ceil_div(chunks, kExactChunks);
  for (std::int64_t s = chunks - 1; s > 0; s -= stride) {
    const std::int64_t past = grid.first_page_of(s);
    const double part = expected_union(config, static_cast<double>(past)) / static_cast<double>(past);
    untouched_log += part < 1 ? static_cast<double>(stride) * std::log1p(-part) : -INFINITY;
    selected = std::min(selected + stride * most_union(config, past), grid.num_pages());
    const std::int64_t homes = owned(s);
    const auto expected = static_cast<std::int64_t>(-std::expm1(untouched_log) * static_cast<double>(homes));
    const std::int64_t most = std::min(homes, layers * std::min(selected, past));
    const std::int64_t bytes_expected = homes * bytes.home + expected * bytes.gradient;
    const std::int64_t bytes_most = homes * bytes.home + most * bytes.gradient;
    if (bytes_expected > demand.bytes_expected) {
      demand.bytes_expected = bytes_expected;
      demand.gradient_slots_expected = expected;
    }
    if (bytes_most > demand.bytes_most) {
      demand.bytes_most = bytes_most;
      demand.gradient_slots_most = most;
    }
  }
  return demand;
}

bool may_select(const RunConfig& config, const ChunkGrid& grid) {
  return !dense(config) && config.attention.budget_pages > 0 && grid.num_pages() > config.attention.budget_pages;
}

}  // namespace oomb::sizes
