// Types shared by every op of kernels/: element types, the queue an op runs on, and the status it returns.
//
// Rules of the folder. An op is one header (its contract), one CPU reference (cpu/) and one CUDA kernel (cuda/).
// Ops take raw pointers and a Queue; they own nothing, allocate nothing, and know neither torch nor MPI. Every pointer
// of one call lives in memory that the queue's device can address. CPU ops return when the result is there; CUDA ops
// return once the work is enqueued on the stream. Sizes are in elements unless a name says bytes. All products of
// sizes are 64-bit. Two calls with the same inputs give the same bits: every sum has a fixed order.
//
// Letters: C tokens of a chunk, P tokens of a page, T tokens of a query tile, Hq/Hkv query/KV heads, G = Hq/Hkv,
// D head dimension, V vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oomb::kernels {

enum class DType : uint8_t { f64, f32, bf16 };

/// Bytes of one element.
constexpr int64_t size_of(DType type) {
  switch (type) {
    case DType::f64:
      return 8;
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
  }
  return 0;
}

/// The type in which an op keeps statistics, sums and gradients of weights for activations of type `type`
/// ("acc" in the headers): f64 for f64, f32 for the others.
constexpr DType accumulator_of(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

enum class Device : uint8_t { cpu, cuda };

/// Where an op runs. `stream` is a cudaStream_t for Device::cuda and unused for Device::cpu.
struct Queue {
  Device device = Device::cpu;
  void* stream = nullptr;
};

enum class Code : uint8_t {
  ok,
  invalid_argument,  ///< sizes, alignment or types that the op does not take; nothing was enqueued
  no_device,         ///< a CUDA queue in a build without CUDA kernels
  launch_failed,     ///< the CUDA runtime refused the launch
};

/// Result of an op. `what` is a string literal, or the CUDA runtime's message, never freed by the caller.
struct [[nodiscard]] Status {
  Code code = Code::ok;
  const char* what = "";
  explicit operator bool() const { return code == Code::ok; }
};

}  // namespace oomb::kernels
