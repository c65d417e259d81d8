// How communication fails, and the deadlines that bound every wait.
//
// Three things end a wait without its result: a peer is gone, the deadline has passed, or somebody aborted. The first
// and the last are final: every pending and every later call of that object throws the same, with its own text of what
// was waited for. A passed deadline leaves the object usable; what it says is missing may still come.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

namespace oomb::comm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// A deadline `seconds` from now.
inline Deadline in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// Base of what communication throws at run time. Misuse by our own code is std::logic_error.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A peer died, closed its end, or was silent for too long.
class PeerLost : public CommError {
 public:
  /// `rank` in the group of the object that throws; `why` and `waiting_for` are short texts without a full stop.
  PeerLost(int rank, const std::string& why, const std::string& waiting_for);
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// The deadline of one call passed. `what()` names what was waited for and, where known, from whom.
class DeadlinePassed : public CommError {
 public:
  explicit DeadlinePassed(const std::string& waiting_for);
};

/// abort() was called, here or by an owner higher up.
class Aborted : public CommError {
 public:
  Aborted(const std::string& reason, const std::string& waiting_for);
};

/// A peer sent something that no correct peer sends.
class ProtocolError : public CommError {
 public:
  using CommError::CommError;
};

/// Why an object can no longer be used; kept once, raised by each call with its own `waiting_for`.
struct Failure {
  enum class Kind { kPeerLost, kAborted };
  Kind kind = Kind::kAborted;
  int rank = -1;  ///< of the lost peer, -1 when aborted
  std::string reason;

  [[noreturn]] void raise(const std::string& waiting_for) const;
};

}  // namespace oomb::comm
