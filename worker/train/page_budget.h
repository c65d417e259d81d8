// How much memory a run's pages get in each tier, and whether a sequence can fit at all.
#pragma once

#include <string>
#include <vector>

#include "configs/run_config.h"
#include "worker/cluster/exchanged_pages.h"
#include "worker/pages/page_table.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb {

/// What a worker shares with others.
struct WorkerShare {
  int workers = 1;            ///< that train a sequence together
  int workers_here = 1;       ///< that share this machine's memory
  bool reads_device = false;  ///< other workers can read this one's device memory
};

struct PageBudget {
  pages::PageMemory::Options memory;
  cluster::TransferSlots transfer;  ///< with several workers
  int64_t home_bytes = 0;           ///< all K/V homes of this worker's chunks of a sequence: needed in any case
  int64_t gradient_bytes = 0;       ///< bound on its gradient slots; reached by dense attention
  ActivationPlan activations;       ///< what fits beside all that
  std::vector<std::string> lines;   ///< what was decided, to be shown
};

/// Budgets from the config, `auto` from what is left on this machine now. Throws InputError with the bytes needed and
/// there, and what would make it fit, when the homes alone (dense: homes and gradient slots) exceed both tiers.
/// `training` = false counts no gradient slots. Homes that others cannot read in device memory all go to host memory,
/// where the slots for transfers are as well.
PageBudget plan_page_budget(const RunConfig& config, const model::ModelConfig& model, const PipelineOptions& pipeline,
                            const TensorTypes& types, bool training, const WorkerShare& share = {});

}  // namespace oomb
