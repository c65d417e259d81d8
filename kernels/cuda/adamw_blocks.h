// AdamW on blocks of kMomentBlock elements: coded moments, weights without a master, or both.
#pragma once

#include "kernels/adamw.h"

namespace oomb::kernels::cuda {

Status adamw_step_in_blocks(void* stream, const AdamW& op);

}  // namespace oomb::kernels::cuda
