// AdamW on blocks of kMomentBlock elements: coded moments, weights without a master, or both.
#pragma once

#include "kernels/adamw.h"

namespace oomb::kernels::cpu {

Status adamw_step_in_blocks(const AdamW& op);

}  // namespace oomb::kernels::cpu
