// How a run's workers are divided: data-parallel groups, and context parallelism inside each.
#pragma once

#include <cstdint>

#include "configs/run_config.h"
#include "coordinator/plan/resolve.h"

namespace oomb::plan {

/// Page means are published to every worker of a group, so a group stays small; beyond that, data parallel.
inline constexpr std::int64_t kMaxGroupWorkers = 64;

struct Layout {
  std::int64_t workers = 1;              // of the whole run
  std::int64_t group_workers = 1;        // W of each group
  std::int64_t sequences_per_group = 1;  // of one step; the most that a group gets
  std::int64_t groups() const { return workers / group_workers; }
};

/// InputError, naming both fields, for more workers than the hardware has or than groups of 64 for the sequences of a
/// step can use. `topology` names the file.
void check_degrees(const RunConfig& config, const Hardware& hardware, const std::string& topology);

/// Layouts to choose from, best first: fewest rounds of chunks on the way to a step, then most groups, which exchange
/// least. Not empty after check_degrees.
std::vector<Layout> possible_layouts(const RunConfig& config);

}  // namespace oomb::plan
