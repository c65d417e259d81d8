// The plan of a run: whether it fits, how long a step takes, what crosses the network, the longest sequence.
//
// Pure but for load_plan, which reads the topology and the model's config.json; it opens neither data nor weights and
// needs no worker. docs/plan.md says how figures come about and which of them are assumed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "coordinator/plan/calibration.h"
#include "coordinator/plan/layout.h"
#include "coordinator/plan/memory.h"
#include "coordinator/plan/resolve.h"
#include "coordinator/plan/simulate.h"
#include "coordinator/plan/traffic.h"
#include "worker/model/hf_config.h"

namespace oomb::plan {

struct Plan {
  std::string run_name;
  std::int64_t sequence_length = 0;
  std::int64_t sequences_per_step = 1;
  Layout layout;
  Hardware hardware;
  MemoryPlan memory;
  StepTime time;
  StepTraffic traffic, ring;
  Exchange exchange = Exchange::kPages;
  /// Most tokens of a sequence, in whole chunks, for which this run fits; one chunk more does not. 0: not even one.
  std::int64_t max_sequence = 0;
  std::string binds;                 // what does not fit, or would not at one chunk more than max_sequence
  std::vector<std::string> changes;  // of a run that does not fit: settings, each line enough, as --set takes them
  double mfu = 0;                    // of the devices' peak; 0 where no peak is known
  std::optional<double> slowdown;    // measured time over simulated time on one worker; none: all rates as given
  std::vector<std::string> notes;    // what is assumed, and what is worth knowing

  bool fits() const { return memory.fits(); }
  std::int64_t tokens_per_step() const { return sequence_length * sequences_per_step; }
  double tokens_per_second() const { return static_cast<double>(tokens_per_step()) / time.total; }
};

/// The layout for which the run fits and is fastest by its rounds of chunks; where none fits, the one with the largest
/// groups, which needs least of each worker.
struct FittedLayout {
  Layout layout;
  MemoryPlan memory;
};
FittedLayout fit_layout(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware);

Plan make_plan(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
               const Calibration* calibration = nullptr);

/// Reads topology.file (none: this machine) and the model's config.json. InputErrors as those readers say, and of
/// check_degrees.
Plan load_plan(const RunConfig& config, const MachineFacts& facts, const Calibration* calibration = nullptr);

}  // namespace oomb::plan
