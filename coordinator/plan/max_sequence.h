// How far a run can be stretched, and what makes one fit that does not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "coordinator/plan/resolve.h"
#include "worker/model/hf_config.h"

namespace oomb::plan {

struct LongestSequence {
  std::int64_t tokens = 0;  // a multiple of sequence.chunk; 0: not even one chunk fits
  std::string binds;        // what does not fit at one chunk more; empty at the schema's own limit
};
/// The same test of fitness as a plan's, by bisection: `tokens` passes it, one chunk more does not.
LongestSequence longest_sequence(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware);

/// Settings, `section.field=value ...`, each line of which makes the run fit: single changes, where none does ever more
/// of them together, and shorter sequences.
std::vector<std::string> changes_to_fit(const RunConfig& config, const model::ModelConfig& model,
                                        const Hardware& hardware, std::int64_t max_sequence);

}  // namespace oomb::plan
