// Frame of the kernel benchmark: CUDA events around single calls, the second-level cache emptied before each, median of
// the runs, and bytes per second beside a device copy measured in the same process.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/types.h"

namespace oomb::kernels::bench {

#define BENCH_CUDA(call)                                                                              \
  do {                                                                                                \
    const cudaError_t error_ = (call);                                                                \
    if (error_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (false)

/// Device memory for the length of a case.
class Block {
 public:
  explicit Block(int64_t bytes, int fill = 0) {
    BENCH_CUDA(cudaMalloc(&data_, static_cast<size_t>(bytes)));
    BENCH_CUDA(cudaMemset(data_, fill, static_cast<size_t>(bytes)));
  }
  Block(Block&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Block& operator=(Block&&) = delete;
  ~Block() { cudaFree(data_); }
  void* get() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

/// `n` bf16 values in (-2, 2), or f32, from a small generator on the host, uploaded.
void fill_random(void* device, DType type, int64_t n, uint64_t seed = 1);

class Bench {
 public:
  Bench();
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Queue queue() const { return {Device::cuda, stream_}; }

  /// Times `call` and prints a line. `bytes` is what the op must read and write at least; `flops` 0: not printed.
  /// A call that changes its inputs is given `reset`, which is not timed.
  void run(const std::string& name, double bytes, double flops, const std::function<Status()>& call,
           const std::function<void()>& reset = {});

 private:
  double seconds(const std::function<Status()>& call, const std::function<void()>& reset);

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  void* flush_ = nullptr;
  double copy_rate_ = 0;
};

/// All cases, at the shapes of Qwen2.5-7B and a chunk of 4,096 tokens.
void bench_elementwise(Bench& bench);

}  // namespace oomb::kernels::bench
