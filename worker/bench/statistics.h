// What is reported of repeated measurements.
#pragma once

#include <algorithm>
#include <vector>

namespace oomb::bench {

/// The middle value, or the mean of the two middle ones. `values` must not be empty.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace oomb::bench
