// Learning-rate schedule, clipping by global norm, and the AdamW step over all parameters.
#pragma once

#include <cstdint>
#include <string>

#include "worker/model/parameters.h"
#include "worker/optim/shards.h"

namespace oomb {

struct OptimizerOptions {
  double learning_rate = 3e-4;
  double min_learning_rate_ratio = 0.1;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;  ///< length of the schedule, whatever step a run ends at
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  double clip_norm = 1.0;      ///< 0: no clipping
  uint64_t rounding_seed = 1;  ///< of stochastic rounding: with the step and the parameter's name it gives all its bits
};

/// Linear warm-up to the full rate at step `warmup_steps`, then a cosine to ratio * rate at `total_steps`. Steps count
/// from 1.
double learning_rate_at(const OptimizerOptions& options, int64_t step);

/// Name of the first parameter whose weight or moments hold NaN or infinite values, or "".
std::string first_not_finite(const model::Parameters& parameters);

/// Norm over all gradients, in double; the order of the sum is fixed. With `shards`, over the shards of all workers.
double global_gradient_norm(const model::Parameters& parameters, const ParameterShards* shards = nullptr);

struct OptimizerReport {
  double gradient_norm = 0;  ///< before clipping
  double learning_rate = 0;
};

/// One AdamW update from the gradients in `parameters`; refreshes the compute weights. Throws InputError, leaving every
/// parameter and moment as it was, if the gradient norm is not finite. With `shards`, gradients are summed over workers
/// first, each updates its own shard, and all get all weights; collective.
OptimizerReport optimizer_step(model::Parameters& parameters, const OptimizerOptions& options, int64_t step,
                               const ParameterShards* shards = nullptr);

}  // namespace oomb
