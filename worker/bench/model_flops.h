// Model FLOPs of a training step, the numerator of MFU: what the mathematics needs, whatever is computed again.
//
//   6 * parameters * tokens          forward (2) and backward (4); parameters without the input embedding, which is a
//                                    table look-up; a tied embedding counts, for it is the head as well
//   12 * Hq * D * L * attended keys  scores and weighted values, forward (4) and backward (8); for each query token the
//                                    keys it attends to: for dense attention (N + 1) / 2 on average, the causal half,
//                                    so 6 * N * Hq * D * L per token; for top-k its own chunk's causal part and
//                                    B pages of P, not the keys that the selection passed over
// Neither the selection nor the optimizer counts.
#pragma once

#include <cstdint>

#include "worker/model/hf_config.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb::bench {

/// Sum over the tokens of one sequence of the keys each attends to.
int64_t attended_keys(const PipelineOptions& options, int64_t num_tokens);

/// Forward and backward of one sequence of `num_tokens`.
double model_flops(const model::ModelConfig& config, const PipelineOptions& options, int64_t num_tokens);

}  // namespace oomb::bench
