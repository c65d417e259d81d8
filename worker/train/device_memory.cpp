#include "worker/train/device_memory.h"

#if OOMB_HAVE_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

namespace oomb {

#if OOMB_HAVE_CUDA

int64_t gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int64_t peak_device_bytes(const at::Device& device) {
  if (!device.is_cuda()) return 0;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.reserved_bytes[0].peak;
}

void reset_peak_device_bytes(const at::Device& device) {
  if (!device.is_cuda()) return;
  c10::cuda::CUDACachingAllocator::emptyCache();
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

int64_t free_device_bytes(const at::Device& device) {
  size_t free_bytes = 0, total = 0;
  if (!device.is_cuda() || cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) return 0;
  return static_cast<int64_t>(free_bytes);
}

#else

int64_t gpu_count() { return 0; }
int64_t peak_device_bytes(const at::Device&) { return 0; }
void reset_peak_device_bytes(const at::Device&) {}
int64_t free_device_bytes(const at::Device&) { return 0; }

#endif

}  // namespace oomb
