// Micro-benchmark of the element-wise ops on a GPU (bench_pages.cpp has the page ops).
#include <bit>
#include <cstring>

#include "tests/bench/bench.h"

namespace oomb::kernels::bench {

constexpr int kRuns = 25, kWarmUp = 3;
constexpr size_t kFlushBytes = size_t{256} << 20;  // several times the second-level cache

void fill_random(void* device, DType type, int64_t n, uint64_t seed) {
  // A block of values repeated: what matters is that they are finite and not all equal.
  const int64_t block = std::min<int64_t>(n, 1 << 20);
  std::vector<unsigned char> bytes(static_cast<size_t>(block * size_of(type)));
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (int64_t i = 0; i < block; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const double x = static_cast<double>(state >> 11) / 2251799813685248.0 - 2.0;
    const float f = static_cast<float>(x);
    const uint16_t half = static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16);
    const void* from = type == DType::f64   ? static_cast<const void*>(&x)
                       : type == DType::f32 ? static_cast<const void*>(&f)
                                            : &half;
    std::memcpy(bytes.data() + i * size_of(type), from, static_cast<size_t>(size_of(type)));
  }
  for (int64_t at = 0; at < n; at += block) {
    const int64_t count = std::min(block, n - at);
    BENCH_CUDA(cudaMemcpy(static_cast<char*>(device) + at * size_of(type), bytes.data(),
                          static_cast<size_t>(count * size_of(type)), cudaMemcpyHostToDevice));
  }
}

Bench::Bench() {
  BENCH_CUDA(cudaStreamCreate(&stream_));
  BENCH_CUDA(cudaEventCreate(&begin_));
  BENCH_CUDA(cudaEventCreate(&end_));
  BENCH_CUDA(cudaMalloc(&flush_, kFlushBytes));
  cudaDeviceProp properties{};
  BENCH_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors, cache %d MiB; median of %d runs after %d, cache emptied before each\n",
              properties.name, properties.multiProcessorCount, properties.l2CacheSize >> 20, kRuns, kWarmUp);
  std::printf("%-44s %10s %10s %10s %8s %10s\n", "op", "us", "MB", "GB/s", "of copy", "TFLOP/s");
  const size_t bytes = size_t{1} << 30;
  Block from(static_cast<int64_t>(bytes)), to(static_cast<int64_t>(bytes));
  const double time = seconds(
      [&]() -> Status {
        BENCH_CUDA(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream_));
        return {};
      },
      {});
  copy_rate_ = 2.0 * static_cast<double>(bytes) / time;
  std::printf("%-44s %10.1f %10.1f %10.0f %8s\n", "copy of 1 GiB", time * 1e6, 2e-6 * static_cast<double>(bytes),
              copy_rate_ / 1e9, "1.00");
}

Bench::~Bench() {
  cudaFree(flush_);
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

double Bench::seconds(const std::function<Status()>& call, const std::function<void()>& reset) {
  std::vector<float> times;
  for (int run = 0; run < kWarmUp + kRuns; ++run) {
    if (reset) reset();
    BENCH_CUDA(cudaMemsetAsync(flush_, run, kFlushBytes, stream_));
    BENCH_CUDA(cudaEventRecord(begin_, stream_));
    if (const Status status = call(); !status) {
      std::fprintf(stderr, "call failed: %s\n", status.what);
      std::exit(1);
    }
    BENCH_CUDA(cudaEventRecord(end_, stream_));
    BENCH_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    BENCH_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    if (run >= kWarmUp) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2] * 1e-3;
}

void Bench::run(const std::string& name, double bytes, double flops, const std::function<Status()>& call,
                const std::function<void()>& reset) {
  const double time = seconds(call, reset);
  std::printf("%-44s %10.1f %10.1f %10.0f %8.2f", name.c_str(), time * 1e6, bytes / 1e6, bytes / time / 1e9,
              bytes / time / copy_rate_);
  if (flops > 0) std::printf(" %10.1f", flops / time / 1e12);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace oomb::kernels::bench

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_kernels needs a GPU\n");
    return 1;
  }
  oomb::kernels::bench::Bench bench;
  oomb::kernels::bench::bench_elementwise(bench);
  return 0;
}
