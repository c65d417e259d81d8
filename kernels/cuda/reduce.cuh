// Sums over a block in a fixed order.
#pragma once

#include <cstdint>

namespace oomb::kernels::cuda {

/// Sum of `value` over the block, given to all its threads. blockDim.x is a multiple of 32; `scratch` holds 32 values
/// and must not be in use: two calls in a row need two scratches or a barrier in between.
template <class A>
__device__ inline A block_sum(A value, A* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  // Every warp folds the same values in the same order, which saves a second barrier.
  value = static_cast<int>(threadIdx.x % 32) < warps ? scratch[threadIdx.x % 32] : A{0};
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

}  // namespace oomb::kernels::cuda
