// How a run can fail, beyond bad input (InputError).
#pragma once

#include <stdexcept>
#include <string>

namespace oomb::control {

/// Exit statuses of `oomb`, also in its help.
enum ExitStatus : int {
  kSuccess = 0,
  kFailed = 1,    // a lost worker, an internal error
  kBadInput = 2,  // something for the user to put right; nothing was lost
  kResource = 3,  // no space, no memory
};                // 128 + signal after a stop by a signal: 130 Ctrl-C, 143 SIGTERM, 138 SIGUSR1, 129 SIGHUP

/// Out of space or memory: here, or told by a worker.
class ResourceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A worker is gone, stuck, or broken; a relaunch may help.
class WorkerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user asked for an end at once, or an orderly one took too long.
class StoppedAtOnce : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace oomb::control
