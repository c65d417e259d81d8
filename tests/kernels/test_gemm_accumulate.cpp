// Weight gradients: dw += dy^T x.
#include <algorithm>

#include "kernels/gemm_accumulate.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 97;

class GemmAccumulateTest : public DeviceTest {};

struct Shape {
  int64_t rows, out, in, pad;
};
const Shape kShapes[] = {{1, 1, 1, 0}, {3, 5, 7, 0}, {37, 64, 24, 8}, {129, 31, 1031, 3}, {500, 16, 16, 0}};

/// Rows `width + pad` apart, NaN between them.
std::vector<double> padded(int64_t rows, int64_t width, int64_t pad, DType type, uint64_t seed) {
  auto values = rounded_values(normal_values(rows * (width + pad), seed), type);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = width; j < width + pad; ++j) values[static_cast<size_t>(i * (width + pad) + j)] = std::nan("");
  }
  return values;
}

TEST_P(GemmAccumulateTest, AddsTheProduct) {
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << " rows " << s.out << "x" << s.in << " pad "
                                        << s.pad << " seed " << kSeed);
      const auto dys = padded(s.rows, s.out, s.pad, type, kSeed), xs = padded(s.rows, s.in, s.pad, type, kSeed + 1);
      const auto before = rounded_values(normal_values(s.out * s.in, kSeed + 2), acc);
      const Buffer dy = input(type, dys), x = input(type, xs), dw = input(acc, before);
      const GemmAccumulate op{s.rows, s.out, s.in, type, dy.data(), s.out + s.pad, x.data(), s.in + s.pad, dw.data()};
      ASSERT_OK(gemm_accumulate(queue(), op));
      ASSERT_OK(gemm_accumulate(queue(), op));
      auto expected = before;
      double scale = 0;
      for (int64_t o = 0; o < s.out; ++o) {
        for (int64_t j = 0; j < s.in; ++j) {
          double sum = 0, magnitude = std::fabs(before[static_cast<size_t>(o * s.in + j)]);
          for (int64_t r = 0; r < s.rows; ++r) {
            const double term =
                dys[static_cast<size_t>(r * (s.out + s.pad) + o)] * xs[static_cast<size_t>(r * (s.in + s.pad) + j)];
            sum += term;
            magnitude += 2 * std::fabs(term);
          }
          expected[static_cast<size_t>(o * s.in + j)] += 2 * sum;
          scale = std::max(scale, magnitude);
        }
      }
      // Tight enough that products in TF32 (2^-11) would show.
      EXPECT_NEAR_ALL(dw.read(), expected, (8 + std::sqrt(static_cast<double>(s.rows))) * unit_roundoff(acc) * scale,
                      0);
    }
  }
}

TEST_P(GemmAccumulateTest, LosesNoBf16Bits) {
  const Buffer dy = input(DType::bf16, {256, 1}), one = input(DType::bf16, {1}), dw = input(DType::f32, {0});
  GemmAccumulate op{1, 1, 1, DType::bf16, dy.data(), 1, one.data(), 1, dw.data()};
  ASSERT_OK(gemm_accumulate(queue(), op));
  op.dy = static_cast<const char*>(dy.data()) + 2;
  ASSERT_OK(gemm_accumulate(queue(), op));
  EXPECT_EQ(dw.read()[0], 257);
  for (int i = 0; i < 1024; ++i) ASSERT_OK(gemm_accumulate(queue(), op));
  EXPECT_EQ(dw.read()[0], 257 + 1024);
}

TEST_P(GemmAccumulateTest, RefusesWhatItCannotDo) {
  EXPECT_OK(gemm_accumulate(
      queue(), {.num_rows = 0, .out_features = 1, .in_features = 1, .dy_row_stride = 1, .x_row_stride = 1}));
  EXPECT_EQ(gemm_accumulate(queue(),
                            {.num_rows = 1, .out_features = 2, .in_features = 1, .dy_row_stride = 1, .x_row_stride = 1})
                .code,
            Code::invalid_argument);
}

OOMB_ON_ALL_DEVICES(GemmAccumulateTest);

}  // namespace
}  // namespace oomb::kernels::testing
