#include "worker/bench/machine.h"

#include <ATen/Parallel.h>
#include <torch/version.h>

#include <fstream>
#include <nlohmann/json.hpp>

#if OOMB_HAVE_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#ifndef OOMB_COMMIT
#error "the build names its commit"
#endif

namespace oomb::bench {

namespace {

using nlohmann::json;

// The value of the first line of `file` that begins with `key`, after `separator`; null if there is none.
json field_of(const char* file, const std::string& key, const std::string& separator) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const size_t at = line.find(separator);
    if (!line.starts_with(key) || at == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", at + separator.size());
    return begin == std::string::npos ? json() : json(line.substr(begin));
  }
  return {};
}

// "NVRM version: NVIDIA UNIX ... Kernel Module  580.82.07  Release Build ..."
json driver_version() {
  const json line = field_of("/proc/driver/nvidia/version", "NVRM version", "Kernel Module");
  if (!line.is_string()) return {};
  const std::string text = line.get<std::string>();
  const size_t digits = text.find_first_of("0123456789");
  return digits == std::string::npos ? json() : json(text.substr(digits, text.find(' ', digits) - digits));
}

std::string gpu_name(const at::Device& device) {
#if OOMB_HAVE_CUDA
  cudaDeviceProp properties{};
  if (device.is_cuda() && cudaGetDeviceProperties(&properties, device.index()) == cudaSuccess) return properties.name;
#else
  static_cast<void>(device);
#endif
  return "";
}

json cuda_version() {
#if OOMB_HAVE_CUDA
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }
#endif
  return {};
}

}  // namespace

json machine_facts(const at::Device& device) {
  const std::string gpu = gpu_name(device);
  return {{"device", device.str()},
          {"gpu", gpu.empty() ? json() : json(gpu)},
          {"cpu", field_of("/proc/cpuinfo", "model name", ":")},
          {"threads", at::get_num_threads()},
          {"torch", TORCH_VERSION},
          {"cuda", device.is_cuda() ? cuda_version() : json()},
          {"driver", device.is_cuda() ? driver_version() : json()},
          {"commit", OOMB_COMMIT}};
}

std::optional<StatedPeak> stated_peak(const at::Device& device, at::ScalarType type) {
  if (type != at::kBFloat16) return std::nullopt;
  const std::string name = gpu_name(device);
  const bool hopper_sxm = name.find("H200") != std::string::npos || name.find("H100 80GB HBM3") != std::string::npos;
  if (hopper_sxm) return StatedPeak{989e12, "data sheet, bf16 without sparsity"};
  if (name.find("A100") != std::string::npos) return StatedPeak{312e12, "data sheet, bf16 without sparsity"};
  return std::nullopt;
}

}  // namespace oomb::bench
