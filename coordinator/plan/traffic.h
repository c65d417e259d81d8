// Bytes that workers of a run send each other in a step, and what a ring would send for the same sequences.
#pragma once

#include <cstdint>

#include "configs/run_config.h"
#include "coordinator/plan/layout.h"
#include "coordinator/plan/memory.h"
#include "worker/model/hf_config.h"
#include "worker/pipeline/chunk_grid.h"
#include "worker/sizes/model_sizes.h"

namespace oomb::plan {

/// One layer of one chunk, over the network.
struct ChunkTraffic {
  double means = 0;          // published to the group, pass 1
  double forward = 0;        // fetched for the attention of a forward: keys and values of others' pages
  double backward = 0;       // fetched for its backward
  double contributions = 0;  // gradients for others' pages
};

/// Sums over all workers and layers of one step.
struct StepTraffic {
  double means = 0, pages = 0, contributions = 0;
  double reduce_scatter = 0, all_gather = 0;  // weight gradients and parameters, over all workers
  double total() const { return means + pages + contributions + reduce_scatter + all_gather; }
};

/// pages: of U selected pages (worker/sizes/page_demand.h, expected) those of other workers are fetched once in each
/// forward and once in the backward, without cache hits; their gradients go back in the format of gradient slots.
/// queries (dense): q goes to each worker with past pages and partial outputs (fp32) come back; backward: q, dO and row
/// terms there, dQ (fp32) back; gradients of pages stay where they are.
/// With `auto`, topk takes pages, dense whichever of both sends less.
class TrafficModel {
 public:
  TrafficModel(const RunConfig& config, const model::ModelConfig& model, const Layout& layout);

  Exchange exchange() const { return exchange_; }
  ChunkTraffic chunk(std::int64_t chunk) const;
  /// `memory` says how many chunks are not computed again and so fetch once less.
  StepTraffic step(const MemoryPlan& memory) const;
  /// One-shot zig-zag ring attention, N / W tokens a worker, per-layer checkpointing: keys and values go around (W - 1
  /// hops) in the forward, again when it is computed again, and in the backward, where their gradients, in the format
  /// of gradient slots, make W hops. Same reduction of weight gradients.
  StepTraffic ring() const;

 private:
  ChunkTraffic by_pages(std::int64_t chunk) const;
  ChunkTraffic by_queries(std::int64_t chunk) const;
  double sequences() const;  // of a step, over all groups
  void add_collectives(StepTraffic& traffic) const;

  const RunConfig& config_;
  const model::ModelConfig& model_;
  Layout layout_;
  ChunkGrid grid_;
  sizes::PageBytes page_;
  Exchange exchange_ = Exchange::kPages;
};

}  // namespace oomb::plan
