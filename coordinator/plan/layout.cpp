#include "coordinator/plan/layout.h"

#include <algorithm>
#include <string>

#include "configs/error.h"

namespace oomb::plan {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

void check_degrees(const RunConfig& config, const Hardware& hardware, const std::string& topology) {
  const std::int64_t workers = config.topology.workers, room = hardware.nodes * hardware.workers_per_node;
  if (workers > room) {
    throw InputError("topology.workers: " + std::to_string(workers) + " workers, and " + topology + " has nodes " +
                     std::to_string(hardware.nodes) + " x " + (hardware.gpu ? "gpus_per_node " : "host.cores ") +
                     std::to_string(hardware.workers_per_node) + " = " + std::to_string(room) + "; allowed: at most " +
                     std::to_string(room));
  }
  if (!possible_layouts(config).empty()) return;
  throw InputError("topology.workers: " + std::to_string(workers) +
                   " workers cannot be divided into equal groups of at most " + std::to_string(kMaxGroupWorkers) +
                   " for train.sequences_per_step " + std::to_string(config.train.sequences_per_step) +
                   "; allowed: at most " + std::to_string(kMaxGroupWorkers) +
                   " workers for each sequence of a step, and a number of groups that divides the workers");
}

std::vector<Layout> possible_layouts(const RunConfig& config) {
  const std::int64_t workers = config.topology.workers, sequences = config.train.sequences_per_step;
  const std::int64_t chunks = ceil_div(config.sequence.length, config.sequence.chunk);
  std::vector<Layout> layouts;
  for (std::int64_t groups = std::min(workers, sequences); groups >= 1; --groups) {
    if (workers % groups != 0 || workers / groups > kMaxGroupWorkers) continue;
    layouts.push_back({workers, workers / groups, ceil_div(sequences, groups)});
  }
  const auto rounds = [&](const Layout& l) { return l.sequences_per_group * ceil_div(chunks, l.group_workers); };
  std::stable_sort(layouts.begin(), layouts.end(),
                   [&](const Layout& a, const Layout& b) { return rounds(a) < rounds(b); });
  return layouts;
}

}  // namespace oomb::plan
