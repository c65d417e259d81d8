// A run's settings as the worker's own types.
#pragma once

#include "configs/run_config.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb {

/// Compute type, and the device: `auto` is the first GPU where there is one.
TensorTypes types_of(const RunConfig& config);

/// Everything but the activations to keep, which page_budget.h plans.
PipelineOptions pipeline_options(const RunConfig& config, const TensorTypes& types);

}  // namespace oomb
