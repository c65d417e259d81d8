// Page ops beyond 32-bit indexes: 4,194,304 tokens of 512 K elements are exactly 2^31, and 65,537 rows pass the limit
// of grid.y and grid.z. Needs a GPU with 48 GB free; says SKIPPED elsewhere. Buffers are zero but for marked elements.
#include <numeric>

#include "kernels/lse_merge.h"
#include "kernels/page_select.h"
#include "kernels/pages.h"
#include "tests/kernels/harness.h"

#ifdef OOMB_HAVE_CUDA
namespace oomb::kernels::testing {
namespace {

constexpr int64_t kTokens = 4194304, kHeads = 4, kDim = 128, kPage = 128, kPages = kTokens / kPage;
constexpr PageShape kShape{kHeads, kPage, kDim};
constexpr Queue kQueue{Device::cuda, nullptr};

/// Zeroed device memory.
class Big {
 public:
  explicit Big(int64_t bytes) {
    if (cudaMalloc(&data_, static_cast<size_t>(bytes)) != cudaSuccess) throw std::runtime_error("out of GPU memory");
    EXPECT_EQ(cudaMemset(data_, 0, static_cast<size_t>(bytes)), cudaSuccess);
  }
  Big(const Big&) = delete;
  Big& operator=(const Big&) = delete;
  ~Big() { cudaFree(data_); }
  char* data() const { return static_cast<char*>(data_); }
  void set(int64_t element, DType type, double value) const {
    unsigned char bytes[8];
    encode(value, type, bytes);
    EXPECT_EQ(
        cudaMemcpy(data() + element * size_of(type), bytes, static_cast<size_t>(size_of(type)), cudaMemcpyDefault),
        cudaSuccess);
  }
  double get(int64_t element, DType type) const {
    unsigned char bytes[8] = {};
    EXPECT_EQ(
        cudaMemcpy(bytes, data() + element * size_of(type), static_cast<size_t>(size_of(type)), cudaMemcpyDefault),
        cudaSuccess);
    return decode(bytes, type);
  }

 private:
  void* data_ = nullptr;
};

class LargePagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (no_cuda() != nullptr) GTEST_SKIP() << no_cuda();
    size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    if (free < size_t{48} << 30) GTEST_SKIP() << "needs 48 GiB of free GPU memory, there are " << (free >> 30);
  }
  template <class T>
  static std::vector<T> slots_of(const Big& arena, DType type) {
    std::vector<T> slots;
    for (int64_t page = 0; page < kPages; ++page) {
      slots.push_back(arena.data() + page * kShape.slot_elements() * size_of(type));
    }
    return slots;
  }
};

TEST_F(LargePagesTest, CopiesReachTheLastElement) {
  const int64_t count = kHeads * kTokens * kDim, last = count - 1, last_slot = kPages * kShape.slot_elements() - 1;
  ASSERT_EQ(count, int64_t{1} << 31);
  const Big k(count * 2), slots_memory(count * 4), k_out(count * 2), v_out(count * 2);
  k.set(0, DType::bf16, 1);
  k.set(last, DType::bf16, 2);
  const Items<void*> slots(Device::cuda, slots_of<void*>(slots_memory, DType::bf16));
  ASSERT_OK(page_write(kQueue, {kShape, kTokens, DType::bf16, k.data(), k.data(), slots.data()}));
  EXPECT_EQ(slots_memory.get(0, DType::bf16), 1);
  EXPECT_EQ(slots_memory.get(last_slot, DType::bf16), 2);
  EXPECT_EQ(slots_memory.get(last_slot - kShape.slot_elements() / 2, DType::bf16), 2) << "the end of the last K";
  // One tile of all pages, then a tile per page.
  for (const int64_t tiles : {int64_t{1}, kPages}) {
    k_out.set(last, DType::bf16, -1);
    v_out.set(last, DType::bf16, -1);
    ASSERT_OK(
        page_gather(kQueue, {kShape, tiles, kPages / tiles, DType::bf16, slots.data(), k_out.data(), v_out.data()}));
    EXPECT_EQ(k_out.get(0, DType::bf16), 1);
    EXPECT_EQ(k_out.get(last, DType::bf16), 2);
    EXPECT_EQ(v_out.get(last, DType::bf16), 2);
    EXPECT_EQ(v_out.get(last - 1, DType::bf16), 0);
  }
}

TEST_F(LargePagesTest, GradientsReachTheLastElement) {
  const int64_t count = kHeads * kTokens * kDim, last = count - 1, last_slot = kPages * kShape.slot_elements() - 1;
  const Big dk(count * 2), slots_memory(count * 8);
  dk.set(0, DType::bf16, 1);
  dk.set(last, DType::bf16, 2);
  slots_memory.set(last_slot, DType::f32, 256.5);
  const Items<void*> slots(Device::cuda, slots_of<void*>(slots_memory, DType::f32));
  std::vector<int64_t> begin(kPages + 1);
  std::iota(begin.begin(), begin.end(), 0);
  std::vector<int32_t> all(kPages);
  std::iota(all.begin(), all.end(), 0);
  const Items<int64_t> begin_in(Device::cuda, begin);
  const Items<int32_t> sources(Device::cuda, all);
  const Items<uint8_t> first(Device::cuda, std::vector<uint8_t>(kPages, 0));
  ASSERT_OK(page_scatter(kQueue, {kShape, kPages, kPages, DType::bf16, DType::f32, dk.data(), dk.data(),
                                  begin_in.data(), sources.data(), slots.data(), first.data()}));
  EXPECT_EQ(slots_memory.get(0, DType::f32), 1);
  EXPECT_EQ(slots_memory.get(last_slot, DType::f32), 258.5);
  EXPECT_EQ(slots_memory.get(last_slot - kShape.slot_elements() / 2, DType::f32), 2);
  slots_memory.set(last_slot, DType::f32, 14);
  const Items<const void*> read(Device::cuda, slots_of<const void*>(slots_memory, DType::f32));
  const Big dv(count * 2);
  ASSERT_OK(page_gradient_read(kQueue, {kShape, kTokens, DType::bf16, DType::f32, read.data(), dk.data(), dv.data()}));
  EXPECT_EQ(dk.get(0, DType::bf16), 2);
  EXPECT_EQ(dk.get(last, DType::bf16), 4);
  EXPECT_EQ(dv.get(last, DType::bf16), 14);
}

TEST_F(LargePagesTest, MeansOfTheLastPage) {
  const int64_t count = kHeads * kTokens * kDim;
  const Big k(count * 2), means(kPages * kHeads * kDim * 2);
  k.set(count - 1, DType::bf16, 128);
  ASSERT_OK(page_means(kQueue,
                       {kTokens, kHeads, kPage, kDim, DType::bf16, k.data(), nullptr, nullptr, nullptr, means.data()}));
  EXPECT_EQ(means.get(kPages * kHeads * kDim - 1, DType::bf16), 1);
  EXPECT_EQ(means.get(kPages * kHeads * kDim - 2, DType::bf16), 0);
}

// 65,537 x 1 x 1 rows, and 599,187 tokens x 28 heads x 128 = 2^31 elements and a few.
TEST_F(LargePagesTest, MergeReachesTheLastRow) {
  struct Rows {
    int64_t heads, tokens, group;
  };
  for (const Rows& r : {Rows{1, 65537, 1}, Rows{4, 599187, 7}}) {
    const int64_t rows = r.heads * r.tokens * r.group;
    const Big a(rows * kDim * 2), out(rows * kDim * 2), lse_a(rows * 4), lse(rows * 4);
    a.set(rows * kDim - 1, DType::bf16, 3);
    lse_a.set(rows - 1, DType::f32, 5);
    LseMerge op{r.heads, r.tokens, r.group, kDim, DType::bf16, DType::bf16, DType::bf16, DType::f32};
    op.o_a = a.data(), op.lse_a = lse_a.data(), op.out = out.data(), op.lse = lse.data();
    op.token_major = true;
    ASSERT_OK(lse_merge(kQueue, op));
    EXPECT_EQ(out.get(rows * kDim - 1, DType::bf16), 3);
    EXPECT_EQ(lse.get(rows - 1, DType::f32), 5);
  }
}

// 65,537 rows of votes, and 65,537 x 32,771 votes: more than 2^31.
TEST_F(LargePagesTest, TopKReachesTheLastRow) {
  const int64_t rows = 65537, pages = 32771, budget = 3;
  const Big votes(rows * pages * 4);
  const Items<int32_t> out(Device::cuda, std::vector<int32_t>(static_cast<size_t>(rows * budget), -1));
  votes.set(rows * pages - 1, DType::f32, 2);
  votes.set(rows * pages - 5, DType::f32, 1);
  PageTopK op{rows, pages, budget, 0, 0, DType::f32, votes.data()};
  op.pages = out.data();
  ASSERT_OK(page_topk(kQueue, op));
  const std::vector<int32_t> chosen = out.read();
  EXPECT_EQ(std::vector<int32_t>(chosen.begin(), chosen.begin() + 3), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(std::vector<int32_t>(chosen.end() - 3, chosen.end()),
            (std::vector<int32_t>{0, static_cast<int32_t>(pages - 5), static_cast<int32_t>(pages - 1)}));
}

}  // namespace
}  // namespace oomb::kernels::testing
#endif
