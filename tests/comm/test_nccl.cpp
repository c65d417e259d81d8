// Collectives over NCCL: one rank per GPU of this machine, each a thread. Without a GPU the tests skip themselves.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <thread>

#include "comm/collectives/nccl_collectives.h"
#include "comm/collectives/pairwise_collectives.h"
#include "comm/collectives/twin_point_to_point.h"
#include "tests/comm/collective_checks.h"

namespace oomb::comm {
namespace {

int num_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Takes the checks' host buffers to the device and back.
class OnDevice final : public Collectives {
 public:
  explicit OnDevice(Collectives* inner) : inner_(inner) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  std::string description() const override { return inner_->description(); }

  void reduce_scatter_sum(const void* send, void* receive, std::int64_t count, ElementType type,
                          Deadline deadline) override {
    const std::int64_t slice = count * bytes_of(type);
    const Copy all(send, slice * size()), own(nullptr, slice);
    inner_->reduce_scatter_sum(all.data, own.data, count, type, deadline);
    own.back(receive);
  }
  void all_gather(const void* send, void* receive, std::int64_t count, ElementType type, Deadline deadline) override {
    const std::int64_t slice = count * bytes_of(type);
    const Copy own(send, slice), all(nullptr, slice * size());
    inner_->all_gather(own.data, all.data, count, type, deadline);
    all.back(receive);
  }
  void all_reduce_sum(void* data, std::int64_t count, ElementType type, Deadline deadline) override {
    const Copy copy(data, count * bytes_of(type));
    inner_->all_reduce_sum(copy.data, count, type, deadline);
    copy.back(data);
  }
  void broadcast(void* data, std::int64_t count, ElementType type, int root, Deadline deadline) override {
    const Copy copy(data, count * bytes_of(type));
    inner_->broadcast(copy.data, count, type, root, deadline);
    copy.back(data);
  }
  void barrier(Deadline deadline) override { inner_->barrier(deadline); }
  std::vector<std::string> all_gather_bytes(const std::string& own, Deadline deadline) override {
    return inner_->all_gather_bytes(own, deadline);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  struct Copy {
    Copy(const void* host, std::int64_t length) : bytes(static_cast<std::size_t>(length)) {
      if (cudaMalloc(&data, std::max<std::size_t>(bytes, 1)) != cudaSuccess) throw std::runtime_error("cudaMalloc");
      if (host != nullptr && cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
        throw std::runtime_error("cudaMemcpy");
      }
    }
    ~Copy() { cudaFree(data); }
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    void back(void* host) const {
      if (cudaMemcpy(host, data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) throw std::runtime_error("cudaMemcpy");
    }
    void* data = nullptr;
    std::size_t bytes;
  };
  Collectives* inner_;
};

void run_ranks(int size, const std::function<void(Collectives&)>& body) {
  auto ends = make_twin_point_to_point(size);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto bootstrap = make_pairwise_collectives(std::move(ends[static_cast<std::size_t>(rank)]), {});
        NcclOptions options;
        options.device = rank;
        const auto nccl = make_nccl_collectives(bootstrap.get(), options, {});
        body(*nccl);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Nccl, OneRankPerGpu) {
  const int gpus = num_gpus();
  if (gpus == 0) GTEST_SKIP() << "no GPU";
  for (int size = 1; size <= gpus; size *= 2) {
    SCOPED_TRACE("W=" + std::to_string(size));
    run_ranks(size, [](Collectives& nccl) {
      OnDevice on_device(&nccl);
      test::check_collectives(on_device, 120);
    });
  }
}

TEST(Nccl, AbortEndsEveryLaterCall) {
  if (num_gpus() == 0) GTEST_SKIP() << "no GPU";
  run_ranks(1, [](Collectives& nccl) {
    nccl.barrier(in_seconds(60));
    std::uint16_t half = 0;
    EXPECT_THROW(nccl.all_reduce_sum(&half, 1, ElementType::kBFloat16, in_seconds(1)), std::logic_error);
    nccl.barrier(in_seconds(60));
    nccl.abort("the run ends");
    EXPECT_THROW(nccl.barrier(in_seconds(60)), Aborted);
  });
}

TEST(Nccl, ADeadlineEndsAWaitForAMissingRank) {
  if (num_gpus() < 2) GTEST_SKIP() << "fewer than two GPUs";
  run_ranks(2, [](Collectives& nccl) {
    nccl.barrier(in_seconds(60));
    if (nccl.rank() == 1) return;
    EXPECT_THROW(nccl.barrier(in_seconds(1)), DeadlinePassed);
    EXPECT_THROW(nccl.barrier(in_seconds(1)), Aborted);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "the kernel that waited has ended";
  });
}

// Where there is no usable GPU, NCCL must say so in a line and not crash.
TEST(Nccl, WithoutAGpuItIsAnError) {
  if (num_gpus() > 0) GTEST_SKIP() << "there is a GPU";
  auto ends = make_twin_point_to_point(1);
  const auto bootstrap = make_pairwise_collectives(std::move(ends[0]), {});
  EXPECT_THROW(make_nccl_collectives(bootstrap.get(), {}, {}), CommError);
}

}  // namespace
}  // namespace oomb::comm
