// Page memory that is certain to hold a given number of pages, for pipelines and layers outside a run's budgets.
#pragma once

#include <ATen/ATen.h>

#include "worker/pages/page_table.h"

namespace oomb::bench {

enum class Placement : uint8_t {
  split,  ///< about half of the homes in the fast tier, so that both tiers are read
  fast,   ///< everything in the fast tier on a GPU, in host memory on a CPU
};

/// Room for all homes and all gradient slots of `layout`. Memory is taken segment by segment as pages are written.
pages::PageMemory::Options page_room(const pages::PageLayout& layout, const at::Device& device, Placement placement);

}  // namespace oomb::bench
