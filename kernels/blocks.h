// Sizes that both devices share because they fix the order of a sum.
#pragma once

#include <cstdint>

namespace oomb::kernels {

/// Elements of one partial sum of sum_of_squares.
inline constexpr int64_t kSumBlock = 16384;

constexpr int64_t num_sum_blocks(int64_t num_elements) { return (num_elements + kSumBlock - 1) / kSumBlock; }

}  // namespace oomb::kernels
