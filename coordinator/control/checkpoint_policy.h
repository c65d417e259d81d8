// When a checkpoint is due.
#pragma once

#include <chrono>
#include <cstdint>

#include "configs/run_config.h"

namespace oomb::control {

class CheckpointPolicy {
 public:
  using Clock = std::chrono::steady_clock;

  /// `done`: steps done by the checkpoint that the run goes on from.
  CheckpointPolicy(const Interval& every, std::int64_t done, Clock::time_point now)
      : every_(every), last_step_(done), last_time_(now) {}

  /// Whether one is due after `step`, by the interval alone.
  bool due(std::int64_t step, Clock::time_point now) const {
    if (every_.steps > 0) return step % every_.steps == 0 && step != last_step_;
    if (every_.seconds > 0) return std::chrono::duration<double>(now - last_time_).count() >= every_.seconds;
    return false;
  }

  /// Whether steps up to `step` would be lost without one.
  bool pending(std::int64_t step) const { return step > last_step_; }

  void made(std::int64_t step, Clock::time_point now) {
    last_step_ = step;
    last_time_ = now;
  }

 private:
  Interval every_;
  std::int64_t last_step_;
  Clock::time_point last_time_;
};

}  // namespace oomb::control
