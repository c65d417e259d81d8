#include "worker/cluster/page_source.h"

namespace oomb::cluster {

void append_local_slot(pages::PageTable& table, int64_t layer, int64_t page, GradientSlots* out) {
  bool is_first = false;
  out->slots.push_back(table.gradient_for_adding(layer, page, &is_first));
  out->first.push_back(is_first ? 1 : 0);
}

GradientSlots LocalPages::gradient_slots(int64_t layer, int64_t /*from_chunk*/, std::span<const int32_t> pages) {
  GradientSlots out;
  for (const int32_t page : pages) append_local_slot(*table_, layer, page, &out);
  return out;
}

}  // namespace oomb::cluster
