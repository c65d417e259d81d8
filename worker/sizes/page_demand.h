// How many pages the chunks of a sequence read, and how much page memory that takes on one worker at most and as
// expected. No torch, no device.
#pragma once

#include <cstdint>

#include "configs/run_config.h"
#include "worker/pipeline/chunk_grid.h"
#include "worker/sizes/model_sizes.h"

namespace oomb::sizes {

/// Pages in the union of a chunk's tiles when `past` pages lie before it. `most`: what the rules bound it to (B per
/// tile, M per chunk, all of them when dense). `expected`: tiles agree in part, so k tiles count as 0.7 k that choose
/// B of n pages independently: n (1 - (1 - B / n)^(0.7 C / T)). The 0.7 is fitted to unions measured at B = 64 with
/// random weights on 64K, 128K, 256K and 1M tokens (233, 456, 657, 1,129 pages in the mean over chunks); all four are
/// met within 5 %. Trained models agree more, so this is a high estimate.
double expected_union(const RunConfig& config, double past);
std::int64_t most_union(const RunConfig& config, std::int64_t past);

/// Page memory of the worker of a group of `workers` that owns most pages, all layers, one sequence in flight.
///
/// Homes are written in pass 1, all but those of the last chunk, which nobody reads. In pass 2, when the chunks from s
/// on have been worked on, homes and gradient slots of chunks before s are there; a slot only if a chunk from s on
/// selected its page. As expected that is the part 1 - prod_{t >= s} (1 - u(t) / n(t)) of them, u the expected union
/// and n(t) the past pages of chunk t, as if choices were independent; at most the sum of the bounds. The peak is over
/// all s.
struct PageDemand {
  std::int64_t home_slots = 0;
  std::int64_t gradient_slots_expected = 0, gradient_slots_most = 0;  // at the peak of each
  std::int64_t bytes_expected = 0, bytes_most = 0;                    // homes and slots together, at that peak
};
PageDemand page_demand(const RunConfig& config, const ChunkGrid& grid, std::int64_t layers, std::int64_t workers,
                       const PageBytes& bytes);

/// Whether some chunk has more past pages than the budget, so that page means are needed.
bool may_select(const RunConfig& config, const ChunkGrid& grid);

}  // namespace oomb::sizes
