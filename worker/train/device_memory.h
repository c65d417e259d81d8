// GPUs of this process and their memory; zeros in a build without CUDA.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace oomb {

int64_t gpu_count();
/// Most bytes that tensors took on the device so far, 0 on a CPU.
int64_t peak_device_bytes(const at::Device& device);
/// Returns cached memory to the device and lets peak_device_bytes() count from now on.
void reset_peak_device_bytes(const at::Device& device);
/// Bytes that a new allocation could still take.
int64_t free_device_bytes(const at::Device& device);

}  // namespace oomb
