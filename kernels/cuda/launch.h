// Grid sizes and launch checks. Only grid.x is used: y and z end at 65,535, which 65,537 rows would pass.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace oomb::kernels::cuda {

/// Largest grid.x of every architecture we build for.
inline constexpr int64_t kMaxBlocks = 2147483647;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Status of the launch that was just made on this thread. The error is taken, so a later call does not meet it again.
inline Status launched() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return {Code::launch_failed, cudaGetErrorString(error)};
}

inline Status checked(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {Code::launch_failed, cudaGetErrorString(error)};
}

/// Multiprocessors of the current device.
inline Status multiprocessors(int* count) {
  int device = 0;
  if (Status s = checked(cudaGetDevice(&device)); !s) return s;
  return checked(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}

}  // namespace oomb::kernels::cuda
