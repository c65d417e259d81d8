#include "comm/errors.h"

#include "comm/memory_kind.h"

namespace oomb::comm {

PeerLost::PeerLost(int rank, const std::string& why, const std::string& waiting_for)
    : CommError("worker " + std::to_string(rank) + " was lost (" + why + ") while waiting for " + waiting_for),
      rank_(rank) {}

DeadlinePassed::DeadlinePassed(const std::string& waiting_for)
    : CommError("the deadline passed while waiting for " + waiting_for) {}

Aborted::Aborted(const std::string& reason, const std::string& waiting_for)
    : CommError("aborted (" + reason + ") while waiting for " + waiting_for) {}

void Failure::raise(const std::string& waiting_for) const {
  switch (kind) {
    case Kind::kPeerLost:
      throw PeerLost(rank, reason, waiting_for);
    case Kind::kAborted:
      throw Aborted(reason, waiting_for);
  }
  throw std::logic_error("a failure of no kind");
}

const char* name_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost:
      return "host";
    case MemoryKind::kCuda:
      return "cuda";
  }
  return "?";
}

}  // namespace oomb::comm
