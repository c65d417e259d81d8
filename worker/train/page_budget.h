// How much memory a run's pages get in each tier, and whether a sequence can fit at all.
#pragma once

#include <string>
#include <vector>

#include "configs/run_config.h"
#include "worker/pages/page_table.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb {

struct PageBudget {
  pages::PageMemory::Options memory;
  int64_t home_bytes = 0;          ///< all K/V homes of one sequence: needed in any case
  int64_t gradient_bytes = 0;      ///< bound on its gradient slots; reached by dense attention
  ActivationPlan activations;      ///< what fits beside all that
  std::vector<std::string> lines;  ///< what was decided, to be shown
};

/// Budgets from the config, `auto` from what is left on this machine now. Throws InputError with the bytes needed and
/// there, and what would make it fit, when the homes alone (dense: homes and gradient slots) exceed both tiers.
/// `training` = false counts no gradient slots.
PageBudget plan_page_budget(const RunConfig& config, const model::ModelConfig& model, const PipelineOptions& pipeline,
                            const TensorTypes& types, bool training);

}  // namespace oomb
