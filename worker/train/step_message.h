// What a worker tells of a step it has done; the keys go into metrics.jsonl.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "worker/train/trainer.h"

namespace oomb {

/// step_done of comm/control_messages.h. With several workers also
///   exchange                  this worker's counts: {"pass1": {kind: [one per layer]}, "pass2": ..., "evaluation":
///   ...},
///                             kinds and passes without a count left out
///   exchange_*_bytes          their sums: pages, contributions, means received
///   *_wait_seconds            time spent waiting for means, pages, contributions of others
///   ring_bytes                what this worker would receive in one-shot ring attention instead
nlohmann::json step_message(const StepReport& report);

}  // namespace oomb
