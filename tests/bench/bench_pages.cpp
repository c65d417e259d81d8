// Times the page ops on a GPU at the shape of Qwen2.5-7B: chunk of 4,096 tokens, pages and tiles of 128, 64 pages a
// tile, 4 KV heads of 7 query heads, head dimension 128, bf16. A 256 MiB write before each timed call empties the L2
// cache. Per op: minimum, median and maximum of 25 calls, the bytes it must move, GB/s, and the share of the rate of a
// device-to-device copy measured in the same run. Votes have a second yardstick: the time that their products would
// take at the rate of a large bf16 matrix product of the vendor's library, measured in the same run (the floor). The
// results are checked by tests/kernels, not here.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/gemm_accumulate.h"
#include "kernels/lse_merge.h"
#include "kernels/page_select.h"
#include "kernels/pages.h"

namespace {

using namespace oomb::kernels;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr int64_t kTokens = 4096, kHeads = 4, kGroup = 7, kDim = 128, kPage = 128, kTile = 128, kBudget = 64;
constexpr int64_t kTiles = kTokens / kTile;
constexpr PageShape kShape{kHeads, kPage, kDim};
constexpr Queue kQueue{Device::cuda, nullptr};
constexpr int kRuns = 25, kWarmUp = 3;
constexpr int64_t kFlushBytes = int64_t{256} << 20;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status) return;
  std::fprintf(stderr, "op failed: %s\n", status.what);
  std::exit(1);
}

struct Freed {
  void operator()(void* p) const { cudaFree(p); }
};
using Memory = std::unique_ptr<void, Freed>;

Memory allocate(int64_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(bytes)), "cudaMalloc");
  check(cudaMemset(p, 0, static_cast<size_t>(bytes)), "cudaMemset");
  return Memory(p);
}
template <class T>
Memory upload(const std::vector<T>& values) {
  Memory m = allocate(static_cast<int64_t>(values.size() * sizeof(T)));
  check(cudaMemcpy(m.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return m;
}
/// Normal bf16 numbers (truncated), so that softmax and top-k see real data; from a block of 1 Mi of them.
Memory random_bf16(int64_t elements, float deviation) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<uint16_t> block(size_t{1} << 20);
  for (uint16_t& x : block) {
    const float f = normal(engine);
    uint32_t bits = 0;
    std::memcpy(&bits, &f, 4);
    x = static_cast<uint16_t>(bits >> 16);
  }
  std::vector<uint16_t> all(static_cast<size_t>(elements));
  for (size_t i = 0; i < all.size(); ++i) all[i] = block[(i + (i >> 20) * 7919) % block.size()];
  return upload(all);
}

class Bench {
 public:
  Bench() : flush_(allocate(kFlushBytes)) {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
    const int64_t bytes = int64_t{1} << 30;
    const Memory a = allocate(bytes), b = allocate(bytes);
    copy_rate_ = 0;
    copy_rate_ = run("device copy of 1 GiB", 2 * bytes, [&] {
      check(cudaMemcpyAsync(b.get(), a.get(), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, nullptr), "copy");
    });
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Returns bytes per second at the median. `flops`: of the tensor cores.
  double run(const std::string& name, int64_t bytes, const std::function<void()>& call, double flops = 0) {
    std::vector<double> seconds;
    for (int i = -kWarmUp; i < kRuns; ++i) {
      check(cudaMemsetAsync(flush_.get(), i & 255, kFlushBytes, nullptr), "flush");
      check(cudaEventRecord(begin_, nullptr), "event");
      call();
      check(cudaEventRecord(end_, nullptr), "event");
      check(cudaEventSynchronize(end_), name.c_str());
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin_, end_), "event");
      if (i >= 0) seconds.push_back(ms * 1e-3);
    }
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2], rate = static_cast<double>(bytes) / median;
    std::printf("%-44s %8.3f %8.3f %8.3f ms %9.1f MB %7.0f GB/s", name.c_str(), seconds.front() * 1e3, median * 1e3,
                seconds.back() * 1e3, static_cast<double>(bytes) * 1e-6, rate * 1e-9);
    if (copy_rate_ > 0) std::printf(" %5.2f of copy", rate / copy_rate_);
    if (flops > 0) std::printf(" %6.0f TFLOP/s", flops / median * 1e-12);
    if (flops > 0 && product_rate_ > 0) {
      const double floor = flops / product_rate_;
      std::printf(", floor %6.3f ms, %5.2f of it", floor * 1e3, median / floor);
    }
    std::printf("\n");
    std::fflush(stdout);
    return rate;
  }

  /// Measures the rate of matrix products that later floors are counted from.
  void measure_products();

 private:
  Memory flush_;
  cudaEvent_t begin_{}, end_{};
  double copy_rate_ = 0;     // bytes per second
  double product_rate_ = 0;  // floating-point operations per second
};

void Bench::measure_products() {
  constexpr int64_t kSide = 8192;
  const Memory a = random_bf16(kSide * kSide, 1), b = random_bf16(kSide * kSide, 1), sum = allocate(kSide * kSide * 4);
  const GemmAccumulate op{kSide, kSide, kSide, DType::bf16, a.get(), kSide, b.get(), kSide, sum.get()};
  const double bytes = static_cast<double>(kSide * kSide) * (2 + 2 + 2 * 4), flops = 2.0 * kSide * kSide * kSide;
  const double rate = run(
      "bf16 product of 8,192 cubed", static_cast<int64_t>(bytes), [&] { check(gemm_accumulate(kQueue, op)); }, flops);
  product_rate_ = rate * flops / bytes;
}

/// What the tiles of a chunk at 1M tokens read: 64 of 8,192 pages each, about 1,100 distinct.
struct Selection {
  std::vector<int64_t> pages;                      // [tile][budget], indexes into the distinct pages
  std::vector<std::vector<int32_t>> contributors;  // of each distinct page
  Selection() {
    std::mt19937 engine(9);
    std::set<int64_t> chosen;
    constexpr int64_t kDistinct = 1129;
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      std::set<int64_t> of_tile{0};
      while (static_cast<int64_t>(of_tile.size()) < kBudget) of_tile.insert(static_cast<int64_t>(engine() % kDistinct));
      pages.insert(pages.end(), of_tile.begin(), of_tile.end());
    }
    contributors.resize(kDistinct);
    for (size_t i = 0; i < pages.size(); ++i) {
      contributors[static_cast<size_t>(pages[i])].push_back(static_cast<int32_t>(i));
    }
  }
};

void bench_moves(Bench& bench) {
  const Selection selection;
  const int64_t distinct = static_cast<int64_t>(selection.contributors.size());
  const int64_t slot = kShape.slot_elements(), chunk = kHeads * kTokens * kDim, batch = kTiles * kBudget * slot / 2;
  const Memory arena = allocate(distinct * slot * 2), grads = allocate(distinct * slot * 4);
  const Memory k = random_bf16(chunk, 1), v = random_bf16(chunk, 1), kb = allocate(batch * 2), vb = allocate(batch * 2);
  std::vector<void*> slots, grad_slots, chosen;
  for (int64_t page = 0; page < distinct; ++page) {
    slots.push_back(static_cast<char*>(arena.get()) + page * slot * 2);
    grad_slots.push_back(static_cast<char*>(grads.get()) + page * slot * 4);
  }
  for (const int64_t page : selection.pages) chosen.push_back(slots[static_cast<size_t>(page)]);
  std::vector<int64_t> begin{0};
  std::vector<int32_t> sources;
  for (const auto& list : selection.contributors) {
    sources.insert(sources.end(), list.begin(), list.end());
    begin.push_back(static_cast<int64_t>(sources.size()));
  }
  const Memory slots_in = upload(slots), grads_in = upload(grad_slots), chosen_in = upload(chosen);
  const Memory begin_in = upload(begin), sources_in = upload(sources);
  const Memory fresh = upload(std::vector<uint8_t>(static_cast<size_t>(distinct), 1));
  const Memory old = upload(std::vector<uint8_t>(static_cast<size_t>(distinct), 0));

  bench.run("page_write 32 pages", 4 * chunk * 2, [&] {
    check(page_write(kQueue,
                     {kShape, kTokens, DType::bf16, k.get(), v.get(), static_cast<void* const*>(slots_in.get())}));
  });
  bench.run("page_gather 32 x 64 pages, 1,129 distinct", 2 * batch * 2 + distinct * slot * 2, [&] {
    check(page_gather(kQueue, {kShape, kTiles, kBudget, DType::bf16, static_cast<const void* const*>(chosen_in.get()),
                               kb.get(), vb.get()}));
  });
  for (const bool first : {true, false}) {
    bench.run(first ? "page_scatter to fresh fp32 slots" : "page_scatter added to fp32 slots",
              2 * batch * 2 + distinct * slot * 4 * (first ? 1 : 2), [&] {
                check(page_scatter(
                    kQueue, {kShape, distinct, kBudget, DType::bf16, DType::f32, kb.get(), vb.get(),
                             static_cast<const int64_t*>(begin_in.get()), static_cast<const int32_t*>(sources_in.get()),
                             static_cast<void* const*>(grads_in.get()),
                             static_cast<const uint8_t*>((first ? fresh : old).get())}));
              });
  }
  bench.run("page_gradient_read 32 pages", 4 * chunk * 2 + 2 * chunk * 4, [&] {
    check(page_gradient_read(kQueue, {kShape, kTokens, DType::bf16, DType::f32,
                                      static_cast<const void* const*>(grads_in.get()), k.get(), v.get()}));
  });
}

void bench_selection(Bench& bench) {
  const Memory q = random_bf16(kHeads * kTokens * kGroup * kDim, 0.35f), k = random_bf16(kHeads * kTokens * kDim, 1);
  const Memory small = allocate(int64_t{1} << 20);
  const Memory angles = upload(std::vector<float>(static_cast<size_t>(32768 * kDim / 2), 0.7f));
  const Memory bias = upload(std::vector<float>(static_cast<size_t>(kHeads * kDim), 3.0f));
  bench.run("page_means 32 pages", kHeads * kTokens * kDim * 2, [&] {
    check(page_means(kQueue, {kTokens, kHeads, kPage, kDim, DType::bf16, k.get(), bias.get(), angles.get(),
                              angles.get(), small.get()}));
  });
  for (const int64_t pages : {256, 2048, 8192, 32768}) {
    const Memory means = random_bf16(pages * kHeads * kDim, 1), votes = allocate(kTiles * pages * 4);
    const std::string of = " of " + std::to_string(pages) + " pages";
    PageVotes op{kTokens, kHeads, kGroup, kDim, kTile, pages, DType::bf16, 1.0, q.get(), means.get()};
    op.votes = votes.get();
    for (const bool with_bias : {false, true}) {
      if (with_bias) op.bias_mean = bias.get(), op.page_cos = op.page_sin = angles.get();
      const Memory workspace = allocate(page_votes_workspace_bytes(kQueue, op));
      op.workspace = workspace.get();
      const int64_t bytes = (kHeads * kTokens * kGroup * kDim + pages * kHeads * kDim) * 2 + kTiles * pages * 4;
      // Of the tensor cores: two sweeps of 2 products (hi and lo of q), or 3 with the bias part.
      const double flops = 2.0 * kHeads * kTokens * static_cast<double>(pages) * kDim * 2 * (with_bias ? 3 : 2);
      bench.run(
          "page_votes" + of + (with_bias ? ", bias" : ""), bytes, [&] { check(page_votes(kQueue, op)); }, flops);
    }
    PageTopK top{kTiles, pages, kBudget, 1, 2, DType::f32, votes.get()};
    top.pages = static_cast<int32_t*>(small.get());
    bench.run("page_topk 64" + of, kTiles * pages * 4, [&] { check(page_topk(kQueue, top)); });
  }
}

void bench_merge(Bench& bench) {
  const int64_t rows = kHeads * kTokens * kGroup, count = rows * kDim;
  const Memory a = random_bf16(count, 1), b = random_bf16(count, 1), out = allocate(count * 2);
  const Memory lse_a = allocate(rows * 4), lse_b = allocate(rows * 4), lse = allocate(rows * 4);
  LseMerge op{kHeads, kTokens, kGroup, kDim, DType::bf16, DType::bf16, DType::bf16, DType::f32};
  op.o_a = a.get(), op.lse_a = lse_a.get(), op.o_b = b.get(), op.lse_b = lse_b.get();
  op.out = out.get(), op.lse = lse.get();
  op.token_major = true;
  bench.run("lse_merge of two sets", 3 * (count * 2 + rows * 4), [&] { check(lse_merge(kQueue, op)); });
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no GPU on this machine\n");
    return 1;
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %d multiprocessors; minimum, median, maximum of %d calls\n", device.name, device.multiProcessorCount,
              kRuns);
  Bench bench;
  bench_moves(bench);
  bench.measure_products();
  bench_selection(bench);
  bench_merge(bench);
  return 0;
}
