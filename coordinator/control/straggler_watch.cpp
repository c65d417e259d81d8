#include "coordinator/control/straggler_watch.h"

#include <algorithm>

namespace oomb::control {

double StragglerWatch::median(std::vector<double> seconds) {
  if (seconds.empty()) return 0;
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>((seconds.size() - 1) / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

std::vector<int> StragglerWatch::take(const std::vector<double>& compute_seconds) {
  slow_steps_.resize(compute_seconds.size());
  const double usual = median(compute_seconds);
  std::vector<int> found;
  for (std::size_t rank = 0; rank < compute_seconds.size(); ++rank) {
    const double seconds = compute_seconds[rank];
    const bool slow = seconds >= kFactor * usual && seconds - usual >= kLeastSeconds;
    slow_steps_[rank] = slow ? slow_steps_[rank] + 1 : 0;
    if (slow_steps_[rank] == kSteps) found.push_back(static_cast<int>(rank));
  }
  return found;
}

}  // namespace oomb::control
