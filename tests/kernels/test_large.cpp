// Sizes whose element indexes pass 2^31 or whose rows pass the 65,535 of grid.y. GPU only: they need up to 40 GB of its
// memory. Buffers are filled with one value; rows 0, 1 and the last two get their own, and only those are checked
// against the formula, with everything past the end of the output still poison.
#include <algorithm>

#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

#ifdef OOMB_HAVE_CUDA

constexpr uint64_t kSeed = 131;

/// GPU memory with one guard block of poison behind it.
class Large {
 public:
  static constexpr size_t kGuard = 4096;

  Large(DType type, int64_t count, int fill) : type_(type), count_(count) {
    const size_t bytes = static_cast<size_t>(count * size_of(type));
    if (cudaMalloc(&data_, bytes + kGuard) != cudaSuccess) {
      cudaGetLastError();
      data_ = nullptr;
      return;
    }
    EXPECT_EQ(cudaMemset(data_, fill, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemset(static_cast<char*>(data_) + bytes, 0xa5, kGuard), cudaSuccess);
  }
  Large(const Large&) = delete;
  Large& operator=(const Large&) = delete;
  ~Large() {
    if (data_ == nullptr) return;
    std::vector<unsigned char> guard(kGuard);
    EXPECT_EQ(cudaMemcpy(guard.data(), static_cast<char*>(data_) + count_ * size_of(type_), kGuard, cudaMemcpyDefault),
              cudaSuccess);
    EXPECT_TRUE(std::all_of(guard.begin(), guard.end(), [](unsigned char b) { return b == 0xa5; }))
        << "written past the end";
    cudaFree(data_);
  }
  void* data() const { return data_; }
  bool ok() const { return data_ != nullptr; }

  void set(int64_t at, const std::vector<double>& values) {
    std::vector<unsigned char> bytes(values.size() * static_cast<size_t>(size_of(type_)));
    for (size_t i = 0; i < values.size(); ++i)
      encode(values[i], type_, bytes.data() + i * static_cast<size_t>(size_of(type_)));
    EXPECT_EQ(
        cudaMemcpy(static_cast<char*>(data_) + at * size_of(type_), bytes.data(), bytes.size(), cudaMemcpyDefault),
        cudaSuccess);
  }
  std::vector<double> get(int64_t at, int64_t n) const {
    std::vector<unsigned char> bytes(static_cast<size_t>(n * size_of(type_)));
    EXPECT_EQ(
        cudaMemcpy(bytes.data(), static_cast<char*>(data_) + at * size_of(type_), bytes.size(), cudaMemcpyDefault),
        cudaSuccess);
    std::vector<double> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(decode(bytes.data() + i * size_of(type_), type_));
    return values;
  }

 private:
  DType type_;
  int64_t count_;
  void* data_ = nullptr;
};

class LargeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (no_cuda() != nullptr) GTEST_SKIP() << no_cuda();
  }
  static constexpr int kPoison = 0xff;  // NaN in every type
  Queue queue() const { return {Device::cuda, nullptr}; }
};

#define SKIP_WITHOUT_MEMORY(condition) \
  if (!(condition)) GTEST_SKIP() << "not enough free GPU memory"

/// First two and last two rows.
std::vector<int64_t> edge_rows(int64_t rows) { return {0, 1, rows - 2, rows - 1}; }

void norm_rows(const Queue& queue, int64_t rows, int64_t hidden) {
  const DType type = DType::bf16;
  Large x(type, rows * hidden, 0), y(type, rows * hidden, 0xff), weight(type, hidden, 0),
      inv_rms(DType::f32, rows, 0xff);
  SKIP_WITHOUT_MEMORY(x.ok() && y.ok() && weight.ok() && inv_rms.ok());
  const auto ws = rounded_values(normal_values(hidden, kSeed), type);
  weight.set(0, ws);
  for (const int64_t row : edge_rows(rows)) {
    x.set(row * hidden, rounded_values(normal_values(hidden, kSeed + static_cast<uint64_t>(row)), type));
  }
  ASSERT_OK(rms_norm_forward(
      queue, {rows, hidden, type, 1e-6, x.data(), nullptr, weight.data(), nullptr, y.data(), inv_rms.data()}));
  std::vector<double> inv;
  for (const int64_t row : edge_rows(rows)) {
    const auto xs = x.get(row * hidden, hidden);
    double squares = 0;
    for (const double v : xs) squares += v * v;
    inv.push_back(1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-6));
    std::vector<double> expected;
    for (size_t j = 0; j < xs.size(); ++j) expected.push_back(xs[j] * inv.back() * ws[j]);
    EXPECT_NEAR_ALL(y.get(row * hidden, hidden), expected, 0, 0.0041) << "row " << row;
  }
  // Backward with dy = x: only the edge rows are not zero, so they are the whole weight gradient.
  const auto middle = inv_rms.get(rows / 2, 1);
  EXPECT_NEAR(middle[0], 1000, 0.1);  // 1 / sqrt(eps)
  Large dweight(DType::f32, hidden, 0);
  Large space(DType::f32, rms_norm_backward_workspace_bytes(queue, rows, hidden, type) / 4, 0xff);
  SKIP_WITHOUT_MEMORY(dweight.ok() && space.ok());
  ASSERT_OK(rms_norm_backward(queue, {rows, hidden, type, x.data(), x.data(), weight.data(), inv_rms.data(), nullptr,
                                      y.data(), dweight.data(), space.data()}));
  std::vector<double> dweight_expected(static_cast<size_t>(hidden));
  size_t edge = 0;
  for (const int64_t row : edge_rows(rows)) {
    const auto xs = x.get(row * hidden, hidden);
    double mean = 0;
    for (size_t j = 0; j < xs.size(); ++j) mean += xs[j] * xs[j] * ws[j] / static_cast<double>(hidden);
    std::vector<double> expected;
    const double r = inv[edge++];
    for (size_t j = 0; j < xs.size(); ++j) {
      expected.push_back(r * (xs[j] * ws[j] - xs[j] * r * r * mean));
      dweight_expected[j] += xs[j] * xs[j] * r;
    }
    EXPECT_NEAR_ALL(y.get(row * hidden, hidden), expected, 1e-5, 0.0041) << "row " << row;
  }
  EXPECT_NEAR_ALL(dweight.get(0, hidden), dweight_expected, 1e-4, 0);
}

TEST_F(LargeTest, RmsNormRowsPastGridY) {
  for (const int64_t rows : {65535, 65536, 65537, 69632}) norm_rows(queue(), rows, 61);
}
TEST_F(LargeTest, RmsNormPast31Bits) { norm_rows(queue(), 599187, 3584); }

void swiglu_rows(const Queue& queue, int64_t rows, int64_t width) {
  const DType type = DType::bf16;
  Large gate_up(type, rows * 2 * width, 0), y(type, rows * width, 0xff);
  SKIP_WITHOUT_MEMORY(gate_up.ok() && y.ok());
  for (const int64_t row : edge_rows(rows)) {
    gate_up.set(row * 2 * width, rounded_values(normal_values(2 * width, kSeed + static_cast<uint64_t>(row)), type));
  }
  ASSERT_OK(swiglu_forward(queue, {rows, width, type, gate_up.data(), y.data()}));
  EXPECT_NEAR_ALL(y.get(rows / 2 * width, width), std::vector<double>(static_cast<size_t>(width), 0.0), 0, 0);
  for (const int64_t row : edge_rows(rows)) {
    const auto in = gate_up.get(row * 2 * width, 2 * width);
    std::vector<double> expected;
    for (int64_t j = 0; j < width; ++j) {
      const double a = in[static_cast<size_t>(j)];
      expected.push_back(a / (1 + std::exp(-a)) * in[static_cast<size_t>(j + width)]);
    }
    EXPECT_NEAR_ALL(y.get(row * width, width), expected, 1e-30, 0.0041) << "row " << row;
  }
  // dy = y of the forward, in place.
  const auto last_dy = y.get((rows - 1) * width, width), last_in = gate_up.get((rows - 1) * 2 * width, 2 * width);
  ASSERT_OK(swiglu_backward(queue, {rows, width, type, gate_up.data(), y.data(), gate_up.data(), nullptr}));
  std::vector<double> d_up;
  for (int64_t j = 0; j < width; ++j) {
    const double a = last_in[static_cast<size_t>(j)];
    d_up.push_back(last_dy[static_cast<size_t>(j)] * a / (1 + std::exp(-a)));
  }
  EXPECT_NEAR_ALL(gate_up.get((rows * 2 - 1) * width, width), d_up, 1e-30, 0.0041);
}

TEST_F(LargeTest, SwigluRowsPastGridY) { swiglu_rows(queue(), 65537, 33); }
TEST_F(LargeTest, SwigluPast31Bits) { swiglu_rows(queue(), 113360, 18944); }

void loss_rows(const Queue& queue, int64_t rows, int64_t vocab) {
  const DType type = DType::bf16;
  Large logits(type, rows * vocab, 0), loss(DType::f32, rows, 0xff), labels(DType::f64, rows, 0);  // labels: all id 0
  SKIP_WITHOUT_MEMORY(logits.ok() && loss.ok() && labels.ok());
  const int64_t last_label = vocab - 1;
  EXPECT_EQ(cudaMemcpy(static_cast<int64_t*>(labels.data()) + rows - 1, &last_label, 8, cudaMemcpyDefault),
            cudaSuccess);
  logits.set(rows * vocab - 1, {4.0});
  ASSERT_OK(cross_entropy(queue, {rows, vocab, vocab, type, 1.0, true, logits.data(),
                                  static_cast<const int64_t*>(labels.data()), loss.data()}));
  const double n = static_cast<double>(vocab), sum = n - 1 + std::exp(4.0);
  EXPECT_NEAR(loss.get(0, 1)[0], std::log(n), 1e-4);
  EXPECT_NEAR(loss.get(rows / 2, 1)[0], std::log(n), 1e-4);
  EXPECT_NEAR(loss.get(rows - 1, 1)[0], std::log(sum) - 4, 1e-4);
  auto first = std::vector<double>(static_cast<size_t>(vocab), 1 / n),
       last = std::vector<double>(static_cast<size_t>(vocab), 1 / sum);
  first[0] -= 1;
  last.back() = std::exp(4.0) / sum - 1;
  EXPECT_NEAR_ALL(logits.get((rows - 2) * vocab, vocab), first, 0, 0.0041);
  EXPECT_NEAR_ALL(logits.get((rows - 1) * vocab, vocab), last, 0, 0.0041);
}

TEST_F(LargeTest, CrossEntropyRowsPastGridY) { loss_rows(queue(), 65537, 37); }
TEST_F(LargeTest, CrossEntropyPast31Bits) { loss_rows(queue(), 14123, 152064); }

TEST_F(LargeTest, RopeOfFourMillionTokens) {
  // K of Qwen2.5-7B, 512 elements per token: element 2^31 is the first that is not there.
  const int64_t tokens = 4194304, heads = 4, dim = 128, row = heads * dim;
  const DType type = DType::bf16;
  Large k(type, tokens * row, 0), y(type, tokens * row, 0xff), cos(DType::f32, tokens * dim / 2, 0),
      sin(DType::f32, tokens * dim / 2, 0);
  SKIP_WITHOUT_MEMORY(k.ok() && y.ok() && cos.ok() && sin.ok());
  const auto ks = rounded_values(normal_values(row, kSeed), type);
  const auto angles = normal_values(dim / 2, kSeed + 1);
  std::vector<double> cs, sn;
  for (const double a : angles) {
    cs.push_back(rounded(std::cos(a), DType::f32));
    sn.push_back(rounded(std::sin(a), DType::f32));
  }
  k.set((tokens - 1) * row, ks);
  cos.set((tokens - 1) * dim / 2, cs);
  sin.set((tokens - 1) * dim / 2, sn);
  ASSERT_OK(rope_apply(queue(), {.num_tokens = tokens,
                                 .num_heads = heads,
                                 .head_dim = dim,
                                 .dtype = type,
                                 .x = k.data(),
                                 .x_token_stride = row,
                                 .x_group_stride = dim,
                                 .y = y.data(),
                                 .y_token_stride = dim,
                                 .y_group_stride = tokens * dim,
                                 .cos = cos.data(),
                                 .sin = sin.data()}));
  for (int64_t h = 0; h < heads; ++h) {
    std::vector<double> expected(static_cast<size_t>(dim));
    for (size_t j = 0; j < 64; ++j) {
      const double a = ks[static_cast<size_t>(h * dim) + j], b = ks[static_cast<size_t>(h * dim) + j + 64];
      expected[j] = a * cs[j] - b * sn[j];
      expected[j + 64] = b * cs[j] + a * sn[j];
    }
    EXPECT_NEAR_ALL(y.get((h * tokens + tokens - 1) * dim, dim), expected, 1e-6, 0.0041);
    EXPECT_NEAR_ALL(y.get((h * tokens + tokens - 2) * dim, dim), std::vector<double>(static_cast<size_t>(dim), 0.0), 0,
                    0);
  }
}

TEST_F(LargeTest, EmbeddingPast31Bits) {
  const int64_t tokens = 599187, hidden = 3584;
  const DType type = DType::bf16;
  Large table(type, 3 * hidden, 0), y(type, tokens * hidden, 0xff), ids(DType::f64, tokens, 0);
  SKIP_WITHOUT_MEMORY(table.ok() && y.ok() && ids.ok());
  const auto rows = rounded_values(normal_values(3 * hidden, kSeed), type);
  table.set(0, rows);
  const int64_t last = 2;
  EXPECT_EQ(cudaMemcpy(static_cast<int64_t*>(ids.data()) + tokens - 1, &last, 8, cudaMemcpyDefault), cudaSuccess);
  ASSERT_OK(embedding_forward(
      queue(), {tokens, hidden, 3, type, static_cast<const int64_t*>(ids.data()), table.data(), y.data()}));
  const auto row = [&](int64_t i) {
    return std::vector<double>(rows.begin() + i * hidden, rows.begin() + (i + 1) * hidden);
  };
  EXPECT_NEAR_ALL(y.get(0, hidden), row(0), 0, 0);
  EXPECT_NEAR_ALL(y.get((tokens - 2) * hidden, hidden), row(0), 0, 0);
  EXPECT_NEAR_ALL(y.get((tokens - 1) * hidden, hidden), row(2), 0, 0);
}

TEST_F(LargeTest, OptimizerPast31Bits) {
  const int64_t n = (int64_t{1} << 31) + 5;
  Large master(DType::f32, n, 0), grad(DType::f32, n, 0), m(DType::f32, n, 0), v(DType::f32, n, 0),
      weight(DType::bf16, n, 0xff);
  SKIP_WITHOUT_MEMORY(master.ok() && grad.ok() && m.ok() && v.ok() && weight.ok());
  grad.set(n - 3, {2, -2, 4});
  Large out(DType::f64, 1, 0), space(DType::f64, sum_of_squares_workspace_bytes(queue(), n) / 8, 0xff);
  ASSERT_OK(sum_of_squares(queue(), {n, DType::f32, grad.data(), static_cast<double*>(out.data()), space.data()}));
  EXPECT_EQ(out.get(0, 1)[0], 24);
  ASSERT_OK(adamw_step(queue(), {.num_elements = n,
                                 .lr = 0.5,
                                 .eps = 0,
                                 .master = master.data(),
                                 .grad = grad.data(),
                                 .m = m.data(),
                                 .v = v.data(),
                                 .weight = weight.data()}));
  // With eps = 0 the first step is lr * sign(gradient); 0 / 0 elsewhere would be NaN, so only the end is looked at.
  EXPECT_NEAR_ALL(master.get(n - 3, 3), (std::vector<double>{-0.5, 0.5, -0.5}), 1e-6, 0);
  EXPECT_NEAR_ALL(weight.get(n - 3, 3), (std::vector<double>{-0.5, 0.5, -0.5}), 0, 0.0041);
}

TEST_F(LargeTest, CodedOptimizerPast31Bits) {
  const int64_t n = (int64_t{1} << 31) + 5, blocks = num_moment_blocks(n);
  Large grad(DType::f32, n, 0), weight(DType::bf16, n, 0), m(DType::f32, n / 4 + 2, 0), v(DType::f32, n / 4 + 2, 0),
      m_scale(DType::f32, blocks, 0), v_scale(DType::f32, blocks, 0);
  SKIP_WITHOUT_MEMORY(grad.ok() && weight.ok() && m.ok() && v.ok() && m_scale.ok() && v_scale.ok());
  grad.set(n - 3, {2, -2, 4});
  ASSERT_OK(adamw_step(queue(), {.num_elements = n,
                                 .lr = 0.5,
                                 .grad = grad.data(),
                                 .m = m.data(),
                                 .v = v.data(),
                                 .weight = weight.data(),
                                 .moments = Moments::int8,
                                 .m_scale = static_cast<float*>(m_scale.data()),
                                 .v_scale = static_cast<float*>(v_scale.data())}));
  EXPECT_NEAR_ALL(weight.get(n - 4, 4), (std::vector<double>{0, -0.5, 0.5, -0.5}), 0, 0.0079);
  // (1 - beta2) g^2 = 0.004, 0.004, 0.016 under one scale: the last block's, and the one before it is all zero.
  const auto scales = v_scale.get(blocks - 2, 2);
  EXPECT_EQ(scales[0], std::ldexp(1.0, -126));
  EXPECT_EQ(scales[1], std::ldexp(1.0, -6 - 31));
}

#else

TEST(LargeTest, NeedsCuda) { GTEST_SKIP() << no_cuda(); }

#endif

}  // namespace
}  // namespace oomb::kernels::testing
