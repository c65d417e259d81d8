// A run's settings as the worker's own types.
#pragma once

#include "configs/run_config.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb {

/// Compute type, and the device: `auto` is a GPU where there is one; workers of one machine take turns in its GPUs.
TensorTypes types_of(const RunConfig& config, int rank_here = 0);

/// Everything but the activations to keep, which page_budget.h plans.
PipelineOptions pipeline_options(const RunConfig& config, const TensorTypes& types);

}  // namespace oomb
