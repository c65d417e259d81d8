#include "comm/collectives/nccl_collectives.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace oomb::comm {

namespace {

constexpr double kFinalizeSeconds = 10;
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kPause = std::chrono::microseconds(20);

void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw CommError(std::string("CUDA, ") + what + ": " + cudaGetErrorString(code));
}

ncclDataType_t nccl_type(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return ncclFloat32;
    case ElementType::kFloat64:
      return ncclFloat64;
    case ElementType::kBFloat16:
      return ncclBfloat16;
    case ElementType::kInt64:
      return ncclInt64;
    case ElementType::kByte:
      return ncclUint8;
  }
  throw std::logic_error("an element of no type");
}

void check_summed(ElementType type) {
  if (type == ElementType::kBFloat16 || type == ElementType::kByte) {
    throw std::logic_error(std::string(name_of(type)) + " is not summed");
  }
}

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(Collectives* bootstrap, const NcclOptions& options, FailureWatch watch);
  ~NcclCollectives() override;
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;

  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->size(); }
  MemoryKind memory() const override { return MemoryKind::kCuda; }
  std::string description() const override { return "nccl " + version_; }

  void reduce_scatter_sum(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                          Deadline deadline) override {
    check_summed(type);
    run("a reduce-scatter", deadline, count_per_rank, [&] {
      return ncclReduceScatter(send, receive, static_cast<std::size_t>(count_per_rank), nccl_type(type), ncclSum,
                               communicator_, stream_);
    });
  }

  void all_gather(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                  Deadline deadline) override {
    run("an all-gather", deadline, count_per_rank, [&] {
      return ncclAllGather(send, receive, static_cast<std::size_t>(count_per_rank), nccl_type(type), communicator_,
                           stream_);
    });
  }

  void all_reduce_sum(void* data, std::int64_t count, ElementType type, Deadline deadline) override {
    check_summed(type);
    run("an all-reduce", deadline, count, [&] {
      return ncclAllReduce(data, data, static_cast<std::size_t>(count), nccl_type(type), ncclSum, communicator_,
                           stream_);
    });
  }

  void broadcast(void* data, std::int64_t count, ElementType type, int root, Deadline deadline) override {
    if (root < 0 || root >= size()) throw std::logic_error("a broadcast from no rank");
    run("a broadcast", deadline, count, [&] {
      return ncclBroadcast(data, data, static_cast<std::size_t>(count), nccl_type(type), root, communicator_, stream_);
    });
  }

  void barrier(Deadline deadline) override {
    run("a barrier", deadline, 1,
        [&] { return ncclAllReduce(barrier_word_, barrier_word_, 1, ncclInt64, ncclSum, communicator_, stream_); });
  }

  std::vector<std::string> all_gather_bytes(const std::string& own, Deadline deadline) override {
    return bootstrap_->all_gather_bytes(own, deadline);
  }

  void abort(const std::string& reason) override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    abort_reason_ = {Failure::Kind::kAborted, -1, reason};
    aborted_.store(true);
  }

 private:
  template <class Launch>
  void run(const char* what, Deadline deadline, std::int64_t count, Launch launch) {
    raise_if_aborted(what);
    if (!broken_.empty()) throw Aborted(broken_, what);
    if (count == 0) return;  // on every rank alike
    try {
      check_cuda(cudaSetDevice(device_), "choosing the device");
      accept(launch(), what);
      wait_for_communicator(what, deadline);
      check_cuda(cudaEventRecord(finished_, stream_), "recording the end of a collective");
      poll(what, deadline, [&] {
        const cudaError_t state = cudaEventQuery(finished_);
        if (state == cudaErrorNotReady) return false;
        check_cuda(state, what);
        return true;
      });
    } catch (...) {
      give_up(what);
      throw;
    }
  }

  // Until NCCL has done on the host what it does without blocking: connecting, or putting the work on the stream.
  void wait_for_communicator(const char* what, Deadline deadline) {
    poll(what, deadline, [&] {
      ncclResult_t state = ncclSuccess;
      accept(ncclCommGetAsyncError(communicator_, &state), what);
      return state == ncclSuccess;
    });
  }

  template <class Done>
  void poll(const char* what, Deadline deadline, Done done) {
    const auto spin_until = Clock::now() + kSpin;
    while (!done()) {
      ncclResult_t state = ncclSuccess;
      accept(ncclCommGetAsyncError(communicator_, &state), what);
      accept(state, what);
      raise_if_aborted(what);
      if (const Failure* failure = watch_ ? watch_() : nullptr) failure->raise(what);
      const auto now = Clock::now();
      if (now >= deadline) throw DeadlinePassed(std::string(what) + " over NCCL");
      if (now > spin_until) std::this_thread::sleep_for(kPause);
    }
  }

  void raise_if_aborted(const char* what) {
    if (!aborted_.load()) return;
    const std::lock_guard lock(abort_mutex_);
    abort_reason_.raise(what);
  }

  void accept(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* more = ncclGetLastError(communicator_);
    throw CommError(std::string("NCCL, ") + what + ": " + ncclGetErrorString(result) +
                    (more != nullptr && *more != '\0' ? std::string(" (") + more + ")" : ""));
  }

  // Ends kernels that wait for a peer; the stream can be used again.
  void give_up(const char* what) {
    broken_ = std::string(what) + " failed before";
    if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
  }

  Collectives* const bootstrap_;
  const FailureWatch watch_;
  const int device_;
  cudaStream_t stream_ = nullptr;
  bool own_stream_ = false;
  cudaEvent_t finished_ = nullptr;
  std::int64_t* barrier_word_ = nullptr;
  ncclComm_t communicator_ = nullptr;
  std::string version_, broken_;
  std::atomic<bool> aborted_{false};
  std::mutex abort_mutex_;
  Failure abort_reason_;
};

NcclCollectives::NcclCollectives(Collectives* bootstrap, const NcclOptions& options, FailureWatch watch)
    : bootstrap_(bootstrap),
      watch_(std::move(watch)),
      device_(options.device),
      stream_(static_cast<cudaStream_t>(options.stream)) {
  const Deadline deadline = in_seconds(options.init_seconds);
  int version = 0;
  accept(ncclGetVersion(&version), "asking for its version");
  version_ =
      std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  check_cuda(cudaSetDevice(device_), "choosing the device");
  if (stream_ == nullptr) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    own_stream_ = true;
  }
  check_cuda(cudaEventCreateWithFlags(&finished_, cudaEventDisableTiming), "making an event");
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&barrier_word_), sizeof(*barrier_word_)), "allocating 8 bytes");
  check_cuda(cudaMemset(barrier_word_, 0, sizeof(*barrier_word_)), "clearing 8 bytes");

  ncclUniqueId id{};
  if (rank() == 0) accept(ncclGetUniqueId(&id), "making an id");
  bootstrap_->broadcast(&id, static_cast<std::int64_t>(sizeof(id)), ElementType::kByte, 0, deadline);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    accept(ncclCommInitRankConfig(&communicator_, size(), id, rank(), &config), "connecting");
    wait_for_communicator("all ranks to connect", deadline);
  } catch (...) {
    give_up("connecting");
    throw;
  }
}

NcclCollectives::~NcclCollectives() {
  cudaSetDevice(device_);
  if (communicator_ != nullptr) {
    try {
      accept(ncclCommFinalize(communicator_), "ending");
      wait_for_communicator("all ranks to end", in_seconds(kFinalizeSeconds));
      ncclCommDestroy(communicator_);
    } catch (const std::exception&) {
      ncclCommAbort(communicator_);
    }
  }
  cudaFree(barrier_word_);
  cudaEventDestroy(finished_);
  if (own_stream_) cudaStreamDestroy(stream_);
}

}  // namespace

bool nccl_available() { return true; }

std::unique_ptr<Collectives> make_nccl_collectives(Collectives* bootstrap, const NcclOptions& options,
                                                   FailureWatch watch) {
  return std::make_unique<NcclCollectives>(bootstrap, options, std::move(watch));
}

}  // namespace oomb::comm
