// The order of work of a step, and how long it takes: a simulation of every (chunk, layer) on every worker of a group.
#pragma once

#include <cstdint>
#include <vector>

#include "configs/run_config.h"
#include "coordinator/plan/cost.h"
#include "coordinator/plan/layout.h"
#include "coordinator/plan/memory.h"
#include "coordinator/plan/resolve.h"
#include "coordinator/plan/traffic.h"
#include "worker/model/hf_config.h"

namespace oomb::plan {

/// Worker of chunk s: round robin from the sequence's offset.
inline std::int64_t owner_of(std::int64_t chunk, std::int64_t offset, std::int64_t workers) {
  return (chunk + offset) % workers;
}

enum class Work : std::uint8_t { kFill, kBackward };
/// Chunks in the order in which their work depends on each other: pass 1 from first to last, pass 2 from last to first.
/// A worker does its own ones in this order; chunks of different workers run side by side, held back, layer by layer,
/// only by means (pass 1) and contributions (pass 2) of chunks before them in the order.
struct Task {
  Work work = Work::kFill;
  std::int64_t chunk = 0;
  std::int64_t worker = 0;
  bool kept = false;   // pass 1 keeps at least attention outputs, pass 2 does not attend again
  bool host = false;   // these wait in host memory
  bool whole = false;  // and keeps all of the level, so pass 2 does not compute it again
};
/// With `every` k > 1 only each k-th round of W chunks, counted from the last one.
std::vector<Task> order_of_work(std::int64_t chunks, std::int64_t workers, std::int64_t offset,
                                const MemoryPlan& memory, std::int64_t every = 1);

/// Seconds of one step. The waits are means over the workers of a group.
struct StepTime {
  double total = 0;
  double pass1 = 0, pass2 = 0;
  double compute = 0;
  double wait_means = 0;          // pass 1: for means of chunks before, at the same layer
  double wait_pages = 0;          // for selected pages of other workers
  double wait_host = 0;           // for pages and gradient slots of the own host memory
  double wait_contributions = 0;  // pass 2: for gradients from later chunks
  double tail = 0;                // no chunk left: the last round is not full
  double collectives = 0;         // weight gradients and parameters
  double optimizer = 0;
};

struct SimulationInput {
  const RunConfig& config;
  const model::ModelConfig& model;
  const Hardware& hardware;
  const Layout& layout;
  const MemoryPlan& memory;
  const CostModel& cost;
  const TrafficModel& traffic;
};

/// Resources of a worker: the GPU, the network in and out, the bus to the host in and out; each serves one thing after
/// another. In pass 1 a chunk's pages are known only after its selection, so their transfer hides behind own-chunk
/// attention (which runs before) and attention to the worker's own pages; in pass 2 all is known and transfers run a
/// layer ahead. Layers of equal cost are simulated all the same: it is what shows waits between workers. Of
/// sequences beyond 131,072 chunks, rounds at even distances stand for those between them. Sequences of a group follow
/// each other; groups are alike, so one is simulated. A group that spans nodes uses links between nodes throughout.
StepTime simulate(const SimulationInput& input);

}  // namespace oomb::plan
