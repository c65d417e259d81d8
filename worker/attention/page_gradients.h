// Sums of page gradients: from the contiguous gradients of tiles into the pages' slots.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "kernels/pages.h"
#include "worker/cluster/page_source.h"

namespace oomb::attention {

/// Which places of a batch of gradients belong to which slot.
struct GradientPlaces {
  int64_t pages_per_tile = 1;
  std::vector<int64_t> begin;    ///< [slots + 1], into sources
  std::vector<int32_t> sources;  ///< tile * pages_per_tile + j, ascending for each slot
};

/// dk, dv [tiles, Hkv, pages_per_tile * P, D], contiguous; each slot's places are added in their order.
void add_to_slots(const kernels::PageShape& shape, const at::Tensor& dk, const at::Tensor& dv,
                  const GradientPlaces& places, const cluster::GradientSlots& slots, at::ScalarType slot_dtype);

}  // namespace oomb::attention
