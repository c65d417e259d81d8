#include "worker/bench/page_room.h"

#include <algorithm>

#include "worker/tensor/segments.h"

namespace oomb::bench {

namespace {

constexpr int64_t kSlotAlignment = 256;  // of pages::Arena
int64_t aligned(int64_t bytes) { return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment; }

}  // namespace

pages::PageMemory::Options page_room(const pages::PageLayout& layout, const at::Device& device, Placement placement) {
  pages::PageMemory::Options o;
  const int64_t home = aligned(layout.kv_slot_bytes), gradient = aligned(layout.gradient_slot_bytes);
  const int64_t count = layout.num_layers * layout.num_pages, largest = std::max(home, gradient);
  o.segment_bytes = std::max(largest, std::min(count * largest / 16, int64_t{1} << 30));
  // The arenas of homes and of gradient slots may each end in a segment that is not full.
  const int64_t all = count * (home + gradient) + 2 * (o.segment_bytes + largest);
  const bool everything_fast = placement == Placement::fast && device.is_cuda();
  o.fast_bytes = everything_fast ? all : placement == Placement::split ? count * home / 2 : 0;
  o.host_bytes = everything_fast ? 0 : all;
  if (device.is_cuda()) {
    o.fast = tensor_segments(at::TensorOptions().device(device));
    o.host = tensor_segments(at::TensorOptions().pinned_memory(true));
  }
  return o;
}

}  // namespace oomb::bench
