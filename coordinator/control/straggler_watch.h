// Finds workers that compute much longer than the others, such as one on a throttled GPU: in lockstep they set the pace
// of the whole cluster, and only their own compute time shows who they are.
#pragma once

#include <vector>

namespace oomb::control {

class StragglerWatch {
 public:
  static constexpr double kFactor = 3;           // times the median of the workers
  static constexpr int kSteps = 3;               // in a row
  static constexpr double kLeastSeconds = 0.05;  // above the median: below it, the machine's noise

  /// Takes each worker's own compute time of a step, by rank. Returns the ranks that have now been too slow for kSteps
  /// steps; each is told once, and again only after a step at the others' pace.
  std::vector<int> take(const std::vector<double>& compute_seconds);

  /// The lower median, so that of two workers the slower one is measured against the faster.
  static double median(std::vector<double> seconds);

 private:
  std::vector<int> slow_steps_;  // by rank
};

}  // namespace oomb::control
