// RMSNorm against its formula in double.
#include <algorithm>

#include "kernels/rms_norm.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

struct Shape {
  int64_t rows, hidden, shift;
};
// Below, at and above a vector, a warp and a block; one path per number of packs a thread holds; addresses off 16
// bytes.
const Shape kShapes[] = {{1, 1, 0},    {3, 7, 0},    {67, 40, 0},  {17, 129, 1},  {5, 64, 1},     {7, 896, 0},
                         {2, 3584, 0}, {3, 5003, 0}, {2, 8192, 0}, {2, 16392, 0}, {1031, 256, 0}, {3, 16384, 0}};
constexpr double kEps = 1e-6;
constexpr uint64_t kSeed = 20260;

class RmsNormTest : public DeviceTest {};

struct Expected {
  std::vector<double> sum, y, inv_rms;
};

Expected forward(const Shape& s, DType type, const std::vector<double>& x, const std::vector<double>* delta,
                 const std::vector<double>& weight) {
  Expected e{x, std::vector<double>(x.size()), {}};
  for (int64_t i = 0; i < s.rows; ++i) {
    double squares = 0;
    for (int64_t j = 0; j < s.hidden; ++j) {
      double& v = e.sum[static_cast<size_t>(i * s.hidden + j)];
      if (delta != nullptr) {
        // The op adds in acc before it rounds.
        v = rounded(rounded(v + (*delta)[static_cast<size_t>(i * s.hidden + j)], accumulator_of(type)), type);
      }
      squares += v * v;
    }
    e.inv_rms.push_back(1 / std::sqrt(squares / static_cast<double>(s.hidden) + kEps));
    for (int64_t j = 0; j < s.hidden; ++j) {
      const size_t at = static_cast<size_t>(i * s.hidden + j);
      e.y[at] = e.sum[at] * e.inv_rms.back() * weight[static_cast<size_t>(j)];
    }
  }
  return e;
}

/// Rounding of the result, plus sums of n terms whose errors are random.
double relative_bound(DType type, int64_t n) {
  const double sums = (8 + std::sqrt(static_cast<double>(n))) * unit_roundoff(accumulator_of(type));
  return unit_roundoff(type) * 1.01 + sums;
}

TEST_P(RmsNormTest, Forward) {
  for (const DType type : kAllTypes) {
    for (const Shape& s : kShapes) {
      for (const bool with_delta : {false, true}) {
        SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << "x" << s.hidden << " shift " << s.shift
                                          << (with_delta ? " + delta" : "") << " seed " << kSeed);
        const int64_t n = s.rows * s.hidden;
        const auto xs = rounded_values(normal_values(n, kSeed), type);
        const auto ds = rounded_values(normal_values(n, kSeed + 1), type);
        const auto ws = rounded_values(normal_values(s.hidden, kSeed + 2), type);
        const Buffer x = input(type, xs, s.shift), delta = input(type, ds, s.shift), weight = input(type, ws, s.shift);
        const Buffer sum = output(type, n, s.shift), y = output(type, n, s.shift);
        const Buffer inv_rms = output(accumulator_of(type), s.rows);
        ASSERT_OK(rms_norm_forward(queue(), {.num_rows = s.rows,
                                             .hidden = s.hidden,
                                             .dtype = type,
                                             .eps = kEps,
                                             .x = x.data(),
                                             .delta = with_delta ? delta.data() : nullptr,
                                             .weight = weight.data(),
                                             .sum = with_delta ? sum.data() : nullptr,
                                             .y = y.data(),
                                             .inv_rms = inv_rms.data()}));
        const Expected e = forward(s, type, xs, with_delta ? &ds : nullptr, ws);
        if (with_delta) {
          EXPECT_NEAR_ALL(sum.read(), e.sum, 0, 0);
        }
        EXPECT_NEAR_ALL(inv_rms.read(), e.inv_rms, 0, relative_bound(accumulator_of(type), s.hidden));
        EXPECT_NEAR_ALL(y.read(), e.y, 0, relative_bound(type, s.hidden));
        EXPECT_NEAR_ALL(x.read(), xs, 0, 0);
      }
    }
  }
}

TEST_P(RmsNormTest, SumMayBeX) {
  const Shape s{5, 72, 0};
  for (const DType type : kAllTypes) {
    const auto xs = rounded_values(normal_values(s.rows * s.hidden, kSeed), type);
    const auto ds = rounded_values(normal_values(s.rows * s.hidden, kSeed + 1), type);
    const std::vector<double> ws(72, 1.0);
    const Buffer x = input(type, xs), delta = input(type, ds), weight = input(type, ws);
    const Buffer y = output(type, s.rows * s.hidden), inv_rms = output(accumulator_of(type), s.rows);
    ASSERT_OK(rms_norm_forward(queue(), {s.rows, s.hidden, type, kEps, x.data(), delta.data(), weight.data(), x.data(),
                                         y.data(), inv_rms.data()}));
    const Expected e = forward(s, type, xs, &ds, ws);
    EXPECT_NEAR_ALL(x.read(), e.sum, 0, 0);
    EXPECT_NEAR_ALL(y.read(), e.y, 0, relative_bound(type, s.hidden));
  }
}

struct Gradients {
  std::vector<double> dx, dweight;
  double dx_scale = 0, dweight_scale = 0;  ///< largest sum of the terms' magnitudes
};

Gradients backward(const Shape& s, const std::vector<double>& dy, const std::vector<double>& x,
                   const std::vector<double>& weight, const std::vector<double>& inv_rms,
                   const std::vector<double>* residual, const std::vector<double>& dweight_before) {
  Gradients g{std::vector<double>(x.size()), dweight_before};
  std::vector<double> magnitude(weight.size());
  for (size_t j = 0; j < weight.size(); ++j) magnitude[j] = std::fabs(dweight_before[j]);
  for (int64_t i = 0; i < s.rows; ++i) {
    const double r = inv_rms[static_cast<size_t>(i)];
    double mean = 0, mean_magnitude = 0;
    for (int64_t j = 0; j < s.hidden; ++j) {
      const size_t at = static_cast<size_t>(i * s.hidden + j), c = static_cast<size_t>(j);
      mean += dy[at] * weight[c] * x[at] / static_cast<double>(s.hidden);
      mean_magnitude += std::fabs(dy[at] * weight[c] * x[at]) / static_cast<double>(s.hidden);
      g.dweight[c] += dy[at] * x[at] * r;
      magnitude[c] += std::fabs(dy[at] * x[at] * r);
    }
    for (int64_t j = 0; j < s.hidden; ++j) {
      const size_t at = static_cast<size_t>(i * s.hidden + j), c = static_cast<size_t>(j);
      const double before = residual != nullptr ? (*residual)[at] : 0;
      g.dx[at] = before + r * (dy[at] * weight[c] - x[at] * r * r * mean);
      g.dx_scale = std::max(g.dx_scale, std::fabs(before) + r * (std::fabs(dy[at] * weight[c]) +
                                                                 std::fabs(x[at]) * r * r * mean_magnitude));
    }
  }
  g.dweight_scale = *std::max_element(magnitude.begin(), magnitude.end());
  return g;
}

TEST_P(RmsNormTest, Backward) {
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    for (const Shape& s : kShapes) {
      for (const bool with_residual : {false, true}) {
        SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << "x" << s.hidden << " shift " << s.shift
                                          << (with_residual ? " + residual" : "") << " seed " << kSeed);
        const int64_t n = s.rows * s.hidden;
        const auto dys = rounded_values(normal_values(n, kSeed + 3), type);
        const auto xs = rounded_values(normal_values(n, kSeed + 4), type);
        const auto ws = rounded_values(normal_values(s.hidden, kSeed + 5), type);
        const auto rs = rounded_values(normal_values(n, kSeed + 6), type);
        const auto before = rounded_values(normal_values(s.hidden, kSeed + 7), acc);
        auto inv = normal_values(s.rows, kSeed + 8);
        for (double& v : inv) v = rounded(0.5 + std::fabs(v), acc);
        const Buffer dy = input(type, dys, s.shift), x = input(type, xs, s.shift), weight = input(type, ws, s.shift);
        const Buffer residual = input(type, rs, s.shift), inv_rms = input(acc, inv);
        const Buffer dx = output(type, n, s.shift), dweight = input(acc, before);
        const auto space = workspace(rms_norm_backward_workspace_bytes(queue(), s.rows, s.hidden, type));
        ASSERT_OK(rms_norm_backward(queue(), {.num_rows = s.rows,
                                              .hidden = s.hidden,
                                              .dtype = type,
                                              .dy = dy.data(),
                                              .x = x.data(),
                                              .weight = weight.data(),
                                              .inv_rms = inv_rms.data(),
                                              .d_residual = with_residual ? residual.data() : nullptr,
                                              .dx = dx.data(),
                                              .dweight = dweight.data(),
                                              .workspace = space.data()}));
        const Gradients e = backward(s, dys, xs, ws, inv, with_residual ? &rs : nullptr, before);
        const double acc_error = 8 + std::sqrt(static_cast<double>(std::max(s.hidden, s.rows)));
        EXPECT_NEAR_ALL(dx.read(), e.dx, acc_error * unit_roundoff(acc) * e.dx_scale, unit_roundoff(type) * 1.01);
        EXPECT_NEAR_ALL(dweight.read(), e.dweight, acc_error * unit_roundoff(acc) * e.dweight_scale, 0);
      }
    }
  }
}

TEST_P(RmsNormTest, BackwardInPlaceAndRepeatable) {
  const Shape s{131, 1000, 0};
  const int64_t n = s.rows * s.hidden;
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    const auto dys = normal_values(n, kSeed), xs = normal_values(n, kSeed + 1), rs = normal_values(n, kSeed + 2);
    std::vector<unsigned char> dx_bits, dweight_bits;
    for (int target = 0; target < 3; ++target) {  // dx apart, in dy, in d_residual
      const Buffer dy = input(type, dys), x = input(type, xs), residual = input(type, rs), apart = output(type, n);
      const Buffer weight = input(type, normal_values(s.hidden, kSeed + 3));
      const Buffer inv_rms = input(acc, std::vector<double>(static_cast<size_t>(s.rows), 0.75));
      const Buffer dweight = input(acc, std::vector<double>(static_cast<size_t>(s.hidden), 0.0));
      const auto space = workspace(rms_norm_backward_workspace_bytes(queue(), s.rows, s.hidden, type));
      const Buffer& dx = target == 0 ? apart : target == 1 ? dy : residual;
      ASSERT_OK(rms_norm_backward(queue(), {s.rows, s.hidden, type, dy.data(), x.data(), weight.data(), inv_rms.data(),
                                            residual.data(), dx.data(), dweight.data(), space.data()}));
      if (target == 0) {
        dx_bits = dx.read_bytes();
        dweight_bits = dweight.read_bytes();
      }
      EXPECT_EQ(dx.read_bytes(), dx_bits) << name_of(type) << " target " << target;
      EXPECT_EQ(dweight.read_bytes(), dweight_bits) << name_of(type) << " target " << target;
    }
  }
}

TEST_P(RmsNormTest, BackwardIsTheDerivativeOfForward) {
  // Central differences of sum(dy * y) in double.
  const Shape s{2, 11, 0};
  const auto xs = normal_values(22, 1), ws = normal_values(11, 2), dys = normal_values(22, 3);
  const auto objective = [&](const std::vector<double>& x, const std::vector<double>& w) {
    const Expected e = forward(s, DType::f64, x, nullptr, w);
    double sum = 0;
    for (size_t i = 0; i < e.y.size(); ++i) sum += e.y[i] * dys[i];
    return sum;
  };
  const Buffer dy = input(DType::f64, dys), x = input(DType::f64, xs), weight = input(DType::f64, ws);
  const Buffer inv_rms = input(DType::f64, forward(s, DType::f64, xs, nullptr, ws).inv_rms);
  const Buffer dx = output(DType::f64, 22), dweight = input(DType::f64, std::vector<double>(11, 0.0));
  const auto space = workspace(rms_norm_backward_workspace_bytes(queue(), 2, 11, DType::f64));
  ASSERT_OK(rms_norm_backward(queue(), {2, 11, DType::f64, dy.data(), x.data(), weight.data(), inv_rms.data(), nullptr,
                                        dx.data(), dweight.data(), space.data()}));
  const auto difference = [&](std::vector<double> values, size_t i, bool of_x) {
    const double step = 1e-5, before = values[i];
    values[i] = before + step;
    const double up = of_x ? objective(values, ws) : objective(xs, values);
    values[i] = before - step;
    const double down = of_x ? objective(values, ws) : objective(xs, values);
    return (up - down) / (2 * step);
  };
  std::vector<double> dx_expected, dweight_expected;
  for (size_t i = 0; i < 22; ++i) dx_expected.push_back(difference(xs, i, true));
  for (size_t i = 0; i < 11; ++i) dweight_expected.push_back(difference(ws, i, false));
  EXPECT_NEAR_ALL(dx.read(), dx_expected, 1e-8, 0);
  EXPECT_NEAR_ALL(dweight.read(), dweight_expected, 1e-8, 0);
}

TEST_P(RmsNormTest, RefusesWhatItCannotDo) {
  const Buffer x = input(DType::f32, {1, 2}), y = output(DType::f32, 2);
  EXPECT_OK(rms_norm_forward(queue(), {.num_rows = 0, .hidden = 2}));
  EXPECT_EQ(rms_norm_forward(queue(), {.num_rows = 1, .hidden = 0}).code, Code::invalid_argument);
  EXPECT_EQ(rms_norm_forward(queue(), {.num_rows = -1, .hidden = 2}).code, Code::invalid_argument);
  EXPECT_EQ(rms_norm_forward(queue(), {.num_rows = 1, .hidden = 2, .x = x.data()}).code, Code::invalid_argument);
  EXPECT_EQ(
      rms_norm_forward(queue(), {1, 2, DType::f32, 0, x.data(), x.data(), x.data(), nullptr, y.data(), y.data()}).code,
      Code::invalid_argument);
}

OOMB_ON_ALL_DEVICES(RmsNormTest);

}  // namespace
}  // namespace oomb::kernels::testing
