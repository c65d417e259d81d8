// What a run may ask for and `oomb plan` can plan, but the programs cannot do yet.
#pragma once

#include "configs/run_config.h"

namespace oomb::control {

/// InputError naming the first setting that no worker supports yet. Called before anything is launched or written.
void refuse_unsupported(const RunConfig& config);

}  // namespace oomb::control
