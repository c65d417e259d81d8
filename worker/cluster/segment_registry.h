// Makes the segments that page homes are cut from readable by other workers, and finds the remote name of an address.
#pragma once

#include <cstdint>
#include <map>

#include "comm/exchange/transport.h"
#include "worker/pages/arena.h"

namespace oomb::cluster {

/// Outlives the arenas that its sources feed. The transport may go before the arenas do: segments are not unregistered
/// one by one, since an arena keeps them until the worker ends. Not thread-safe.
class SegmentRegistry {
 public:
  /// `register_seconds`: how long peers may take to learn of a new segment.
  SegmentRegistry(comm::Transport* transport, double register_seconds)
      : transport_(transport), register_seconds_(register_seconds) {}
  SegmentRegistry(const SegmentRegistry&) = delete;
  SegmentRegistry& operator=(const SegmentRegistry&) = delete;

  /// `source`, and each segment it allocates is registered.
  pages::SegmentSource registered(pages::SegmentSource source, comm::MemoryKind kind);
  /// std::logic_error for an address outside of all segments.
  comm::RemoteAddress locate(const void* address) const;

 private:
  struct Segment {
    int64_t bytes = 0;
    comm::SegmentId id = 0;
  };
  comm::Transport* transport_;
  double register_seconds_;
  std::map<const char*, Segment> segments_;  // by their first byte
};

}  // namespace oomb::cluster
