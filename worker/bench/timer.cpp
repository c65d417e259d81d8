#include "worker/bench/timer.h"

#include <chrono>

#include "worker/tensor/glue.h"

#if OOMB_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace oomb::bench {

#if OOMB_HAVE_CUDA
namespace {

// A cache that keeps some lines longer than others is still overwritten by several times its size.
constexpr int64_t kCacheFactor = 4;

int64_t cache_bytes(const at::Device& device) {
  int bytes = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device.index()));
  return bytes;
}

class Event {
 public:
  Event() { C10_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  double seconds_since(const Event& start) const {
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

double event_seconds(const at::Device& device, const std::function<void()>& call) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  Event begin, end;
  begin.record(stream);
  call();
  end.record(stream);
  return end.seconds_since(begin);
}

}  // namespace
#endif

Timer::Timer(const at::Device& device) : device_(device) {
#if OOMB_HAVE_CUDA
  if (device.is_cuda()) {
    flush_ = at::empty({kCacheFactor * cache_bytes(device)}, at::TensorOptions().dtype(at::kByte).device(device));
  }
#endif
}

const char* Timer::clock() const { return device_.is_cuda() ? "events on the stream" : "steady clock"; }

int64_t Timer::flushed_bytes() const { return flush_.defined() ? flush_.numel() : 0; }

std::vector<double> Timer::time(const Repeats& repeats, const std::function<void()>& call) const {
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeats.warmup + repeats.count; ++i) {
    if (flush_.defined()) flush_.fill_(i & 1);
    double taken = 0;
#if OOMB_HAVE_CUDA
    if (device_.is_cuda()) taken = event_seconds(device_, call);
#endif
    if (!device_.is_cuda()) {
      const auto start = std::chrono::steady_clock::now();
      call();
      taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    if (i >= repeats.warmup) seconds.push_back(taken);
  }
  return seconds;
}

}  // namespace oomb::bench
