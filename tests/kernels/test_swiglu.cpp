// SwiGLU against its formula in double.
#include <algorithm>

#include "kernels/swiglu.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 47;

class SwigluTest : public DeviceTest {};

struct Shape {
  int64_t rows, width, shift;
};
const Shape kShapes[] = {{1, 1, 0}, {3, 7, 0}, {5, 1000, 0}, {2, 18944, 0}, {1031, 24, 0}, {4, 64, 1}, {13, 257, 0}};

/// Normal values with the edges of the exponential among them.
std::vector<double> gates(const Shape& s, DType type) {
  auto values = normal_values(s.rows * 2 * s.width, kSeed, 4.0);
  const double edges[] = {0.0, -0.0, 100.0, -100.0, 88.5, -88.5, 1e-30, -1e-30, 3000.0, -3000.0, -1.2784645427610738};
  for (size_t i = 0; i < std::size(edges) && i * 3 < values.size(); ++i) values[i * 3] = edges[i];
  return rounded_values(values, type);
}

TEST_P(SwigluTest, Forward) {
  for (const DType type : kAllTypes) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << "x" << s.width << " seed " << kSeed);
      const auto in = gates(s, type);
      const Buffer gate_up = input(type, in, s.shift), y = output(type, s.rows * s.width, s.shift);
      ASSERT_OK(swiglu_forward(queue(), {s.rows, s.width, type, gate_up.data(), y.data()}));
      std::vector<double> expected;
      for (int64_t i = 0; i < s.rows; ++i) {
        for (int64_t j = 0; j < s.width; ++j) {
          const double a = in[static_cast<size_t>(i * 2 * s.width + j)];
          expected.push_back(a / (1 + std::exp(-a)) * in[static_cast<size_t>((i * 2 + 1) * s.width + j)]);
        }
      }
      // In float, silu below -87 underflows to 0 or loses bits: at most 100 * 1e-38 * |up|.
      const double tiny = type == DType::f64 ? 1e-300 : 1e-34;
      EXPECT_NEAR_ALL(y.read(), expected, tiny, unit_roundoff(type) * 1.01 + 12 * unit_roundoff(accumulator_of(type)));
    }
  }
}

TEST_P(SwigluTest, Backward) {
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    for (const Shape& s : kShapes) {
      const auto in = gates(s, type);
      const auto grads = rounded_values(normal_values(s.rows * s.width, kSeed + 1), type);
      std::vector<double> expected(in.size()), y_expected;
      double scale = 0;
      for (int64_t i = 0; i < s.rows; ++i) {
        for (int64_t j = 0; j < s.width; ++j) {
          const size_t g = static_cast<size_t>(i * 2 * s.width + j), u = g + static_cast<size_t>(s.width);
          const double a = in[g], dy = grads[static_cast<size_t>(i * s.width + j)];
          const double sig = 1 / (1 + std::exp(-a));
          expected[g] = dy * in[u] * sig * (1 + a * (1 - sig));
          expected[u] = dy * a * sig;
          y_expected.push_back(a * sig * in[u]);
          scale = std::max(scale, std::fabs(dy * in[u]));
        }
      }
      const double relative = unit_roundoff(type) * 1.01 + 12 * unit_roundoff(acc);
      for (int variant = 0; variant < 4; ++variant) {  // in place or not, with and without y
        SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << "x" << s.width << " variant " << variant
                                          << " seed " << kSeed);
        const Buffer gate_up = input(type, in, s.shift), dy = input(type, grads, s.shift);
        const Buffer apart = output(type, s.rows * 2 * s.width, s.shift), y = output(type, s.rows * s.width, s.shift);
        const Buffer& d_gate_up = variant % 2 == 0 ? apart : gate_up;
        const bool with_y = variant >= 2;
        ASSERT_OK(swiglu_backward(queue(), {s.rows, s.width, type, gate_up.data(), dy.data(), d_gate_up.data(),
                                            with_y ? y.data() : nullptr}));
        // silu' has a root, where the two terms cancel: an error of the terms' size remains.
        EXPECT_NEAR_ALL(d_gate_up.read(), expected, 8 * unit_roundoff(acc) * scale, relative);
        if (with_y) {
          EXPECT_NEAR_ALL(y.read(), y_expected, type == DType::f64 ? 1e-300 : 1e-34, relative);
        }
      }
    }
  }
}

TEST_P(SwigluTest, NanGoesThrough) {
  const Buffer gate_up = input(DType::bf16, {std::nan(""), 1, 1, 1, std::nan(""), 1}), y = output(DType::bf16, 3);
  ASSERT_OK(swiglu_forward(queue(), {1, 3, DType::bf16, gate_up.data(), y.data()}));
  const auto out = y.read();
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_FALSE(std::isnan(out[2]));
}

TEST_P(SwigluTest, RefusesWhatItCannotDo) {
  EXPECT_OK(swiglu_forward(queue(), {.num_rows = 0, .width = 4}));
  EXPECT_EQ(swiglu_forward(queue(), {.num_rows = 1, .width = 0}).code, Code::invalid_argument);
  EXPECT_EQ(swiglu_forward(queue(), {.num_rows = 1, .width = 4}).code, Code::invalid_argument);
  EXPECT_EQ(swiglu_backward(queue(), {.num_rows = int64_t{1} << 40, .width = int64_t{1} << 40}).code,
            Code::invalid_argument);
}

OOMB_ON_ALL_DEVICES(SwigluTest);

}  // namespace
}  // namespace oomb::kernels::testing
