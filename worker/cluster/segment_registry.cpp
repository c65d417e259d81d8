#include "worker/cluster/segment_registry.h"

#include <stdexcept>

namespace oomb::cluster {

pages::SegmentSource SegmentRegistry::registered(pages::SegmentSource source, comm::MemoryKind kind) {
  pages::SegmentSource out;
  out.allocate = [this, kind, source](int64_t bytes) -> void* {
    void* memory = source.allocate(bytes);
    if (memory == nullptr) return nullptr;
    try {
      const comm::SegmentId id = transport_->register_segment(memory, bytes, kind, comm::in_seconds(register_seconds_));
      segments_[static_cast<const char*>(memory)] = {bytes, id};
    } catch (...) {
      source.release(memory, bytes);
      throw;
    }
    return memory;
  };
  out.release = [this, release = source.release](void* memory, int64_t bytes) {
    segments_.erase(static_cast<const char*>(memory));
    release(memory, bytes);
  };
  return out;
}

comm::RemoteAddress SegmentRegistry::locate(const void* address) const {
  const auto* place = static_cast<const char*>(address);
  auto after = segments_.upper_bound(place);
  if (after != segments_.begin()) {
    const auto& [begin, segment] = *--after;
    if (place - begin < segment.bytes) return {segment.id, place - begin};
  }
  throw std::logic_error("SegmentRegistry: an address outside of all registered segments");
}

}  // namespace oomb::cluster
