#include "worker/tensor/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "configs/this_machine.h"
#if OOMB_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace oomb {

namespace {

constexpr int64_t kStride = int64_t{64} << 20;  // what a thread populates at a time

// Pages come into being on several threads; false if one cannot. Kernels before 5.14 do not know the advice: then
// pinning itself populates.
bool populate(char* memory, int64_t bytes) {
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: without huge pages it is only slower
#ifdef MADV_POPULATE_WRITE
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    for (int64_t begin = next.fetch_add(kStride); begin < bytes && !failed; begin = next.fetch_add(kStride)) {
      const auto length = static_cast<size_t>(std::min(kStride, bytes - begin));
      if (madvise(memory + begin, length, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) failed = true;
    }
  };
  std::vector<std::thread> threads;
  const int64_t count = std::min<int64_t>({available_cores(), 16, (bytes + kStride - 1) / kStride});
  for (int64_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return !failed;
#else
  return true;
#endif
}

}  // namespace

std::unique_ptr<PinnedBlock> PinnedBlock::allocate(int64_t bytes, const at::Device& device) {
  // A populated page that the machine does not have would end the process rather than fail.
  const int64_t left = available_host_bytes();
  if (bytes <= 0 || (left >= 0 && bytes > left)) return nullptr;
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  bool ok = populate(static_cast<char*>(memory), bytes), registered = false;
#if OOMB_HAVE_CUDA
  if (ok && device.is_cuda()) {
    ok = registered = cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterDefault) == cudaSuccess;
    if (!ok) static_cast<void>(cudaGetLastError());  // it is reported by returning null, not by the next launch
  }
#else
  static_cast<void>(device);
#endif
  if (!ok) {
    munmap(memory, static_cast<size_t>(bytes));
    return nullptr;
  }
  return std::unique_ptr<PinnedBlock>(new PinnedBlock(memory, bytes, registered));
}

PinnedBlock::~PinnedBlock() {
#if OOMB_HAVE_CUDA
  if (registered_) static_cast<void>(cudaHostUnregister(memory_));
#endif
  munmap(memory_, static_cast<size_t>(bytes_));
}

at::Tensor PinnedBlock::view(int64_t offset, at::IntArrayRef sizes, at::ScalarType type) const {
  int64_t end = static_cast<int64_t>(c10::elementSize(type));
  for (const int64_t size : sizes) end *= size;
  end += offset;
  if (offset < 0 || end > bytes_) {
    throw std::logic_error("PinnedBlock: bytes " + std::to_string(offset) + " to " + std::to_string(end) + " of " +
                           std::to_string(bytes_));
  }
  return at::from_blob(static_cast<char*>(memory_) + offset, sizes, at::TensorOptions().dtype(type));
}

}  // namespace oomb
