// Rotary embedding against its formula, with angles in long double.
#include "kernels/rope.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 31;

class RopeTest : public DeviceTest {};

TEST_P(RopeTest, TableHoldsAtFourMillionTokens) {
  const std::vector<int64_t> positions = {0, 1, 2, 17, 131071, 1000003, 4194303};
  std::vector<double> inv_freq;
  for (int j = 0; j < 64; ++j) inv_freq.push_back(std::pow(1e6, -j / 64.0));
  const auto pos = items(positions);
  const Buffer freq = input(DType::f64, inv_freq);
  for (const DType acc : {DType::f32, DType::f64}) {
    for (const double scale : {1.0, 1.1386294}) {
      const int64_t n = static_cast<int64_t>(positions.size()) * 64;
      const Buffer cos = output(acc, n), sin = output(acc, n);
      ASSERT_OK(rope_table(queue(), {.num_tokens = static_cast<int64_t>(positions.size()),
                                     .half_dim = 64,
                                     .acc = acc,
                                     .scale = scale,
                                     .positions = pos.data(),
                                     .inv_freq = static_cast<const double*>(freq.data()),
                                     .cos = cos.data(),
                                     .sin = sin.data()}));
      std::vector<double> cos_expected, sin_expected;
      for (const int64_t p : positions) {
        for (const double f : inv_freq) {
          const long double angle = static_cast<long double>(p) * static_cast<long double>(f);
          cos_expected.push_back(static_cast<double>(scale * std::cos(angle)));
          sin_expected.push_back(static_cast<double>(scale * std::sin(angle)));
        }
      }
      // The product of position and frequency is rounded once in double: 4194303 * 2^-53.
      const double bound = scale * (4.7e-10 + 4 * unit_roundoff(acc));
      EXPECT_NEAR_ALL(cos.read(), cos_expected, bound, 0);
      EXPECT_NEAR_ALL(sin.read(), sin_expected, bound, 0);
    }
  }
}

struct Case {
  int64_t tokens, heads, head_dim, group, shift;
};
const Case kCases[] = {{1, 1, 2, 1, 0},   {3, 4, 6, 2, 0},   {5, 28, 128, 7, 0}, {7, 4, 128, 1, 0},
                       {9, 14, 64, 7, 0}, {11, 6, 80, 3, 1}, {300, 3, 16, 3, 0}, {2, 5, 34, 5, 0}};

/// From rows of a fused projection, `extra` elements wider than the heads, to [Hkv, C, G, D], and back in the inverse.
TEST_P(RopeTest, RotatesBetweenLayouts) {
  for (const DType type : kAllTypes) {
    for (const Case& c : kCases) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " tokens " << c.tokens << " heads " << c.heads << " dim "
                                        << c.head_dim << " group " << c.group << " seed " << kSeed);
      const DType acc = accumulator_of(type);
      const int64_t half = c.head_dim / 2, extra = 16, row = c.heads * c.head_dim + extra;
      auto xs = rounded_values(normal_values(c.tokens * row, kSeed), type);
      for (int64_t t = 0; t < c.tokens; ++t) {
        for (int64_t j = row - extra; j < row; ++j) xs[static_cast<size_t>(t * row + j)] = std::nan("");
      }
      std::vector<double> angles = normal_values(c.tokens * half, kSeed + 1, 3.0), cs, sn;
      for (const double a : angles) {
        cs.push_back(rounded(std::cos(a), acc));
        sn.push_back(rounded(std::sin(a), acc));
      }
      const Buffer x = input(type, xs, c.shift), cos = input(acc, cs), sin = input(acc, sn);
      const int64_t n = c.tokens * c.heads * c.head_dim;
      for (const bool inverse : {false, true}) {
        const Buffer y = output(type, n, c.shift);
        ASSERT_OK(rope_apply(queue(), {.num_tokens = c.tokens,
                                       .num_heads = c.heads,
                                       .head_dim = c.head_dim,
                                       .group = c.group,
                                       .dtype = type,
                                       .inverse = inverse,
                                       .x = x.data(),
                                       .x_token_stride = row,
                                       .x_group_stride = c.group * c.head_dim,
                                       .x_head_stride = c.head_dim,
                                       .y = y.data(),
                                       .y_token_stride = c.group * c.head_dim,
                                       .y_group_stride = c.tokens * c.group * c.head_dim,
                                       .y_head_stride = c.head_dim,
                                       .cos = cos.data(),
                                       .sin = sin.data()}));
        std::vector<double> expected(static_cast<size_t>(n));
        for (int64_t t = 0; t < c.tokens; ++t) {
          for (int64_t h = 0; h < c.heads; ++h) {
            const int64_t to = ((h / c.group) * c.tokens + t) * c.group * c.head_dim + (h % c.group) * c.head_dim;
            for (int64_t j = 0; j < half; ++j) {
              const size_t from = static_cast<size_t>(t * row + h * c.head_dim + j);
              const double a = xs[from], b = xs[from + static_cast<size_t>(half)];
              const double co = cs[static_cast<size_t>(t * half + j)];
              const double si = sn[static_cast<size_t>(t * half + j)] * (inverse ? -1 : 1);
              expected[static_cast<size_t>(to + j)] = a * co - b * si;
              expected[static_cast<size_t>(to + j + half)] = b * co + a * si;
            }
          }
        }
        EXPECT_NEAR_ALL(y.read(), expected, 16 * unit_roundoff(acc), unit_roundoff(type) * 1.01);
      }
    }
  }
}

TEST_P(RopeTest, InPlaceAndBackIsTheIdentity) {
  const int64_t tokens = 37, heads = 3, dim = 24, row = heads * dim;
  const auto xs = normal_values(tokens * row, kSeed);
  std::vector<double> cs, sn;
  for (const double a : normal_values(tokens * dim / 2, kSeed + 1)) {
    cs.push_back(std::cos(a));
    sn.push_back(std::sin(a));
  }
  const Buffer x = input(DType::f64, xs), cos = input(DType::f64, cs), sin = input(DType::f64, sn);
  RopeApply op{tokens, heads, dim,      1,   DType::f64, false, x.data(),   row,
               dim,    0,     x.data(), row, dim,        0,     cos.data(), sin.data()};
  ASSERT_OK(rope_apply(queue(), op));
  op.inverse = true;
  ASSERT_OK(rope_apply(queue(), op));
  EXPECT_NEAR_ALL(x.read(), xs, 1e-14, 0);
}

TEST_P(RopeTest, WithoutAnglesItCopies) {
  for (const DType type : kAllTypes) {
    const int64_t tokens = 13, heads = 4, dim = 16;
    const auto xs = rounded_values(normal_values(tokens * heads * dim, kSeed), type);
    const Buffer x = input(type, xs), y = output(type, tokens * heads * dim);
    ASSERT_OK(rope_apply(queue(), {.num_tokens = tokens,
                                   .num_heads = heads,
                                   .head_dim = dim,
                                   .dtype = type,
                                   .x = x.data(),
                                   .x_token_stride = heads * dim,
                                   .x_group_stride = dim,
                                   .y = y.data(),
                                   .y_token_stride = dim,
                                   .y_group_stride = tokens * dim}));
    std::vector<double> expected(xs.size());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t j = 0; j < dim; ++j) {
          expected[static_cast<size_t>((h * tokens + t) * dim + j)] =
              xs[static_cast<size_t>((t * heads + h) * dim + j)];
        }
      }
    }
    EXPECT_NEAR_ALL(y.read(), expected, 0, 0);
  }
}

TEST_P(RopeTest, RefusesWhatItCannotDo) {
  const Buffer x = input(DType::f32, {1, 2, 3, 4});
  RopeApply op{1, 2, 2, 1, DType::f32, false, x.data(), 4, 2, 0, x.data(), 4, 2, 0, x.data(), x.data()};
  EXPECT_OK(rope_apply(queue(), {.num_tokens = 0, .num_heads = 1, .head_dim = 2}));
  RopeApply odd = op;
  odd.head_dim = 3;
  EXPECT_EQ(rope_apply(queue(), odd).code, Code::invalid_argument);
  RopeApply half_angles = op;
  half_angles.sin = nullptr;
  EXPECT_EQ(rope_apply(queue(), half_angles).code, Code::invalid_argument);
  RopeApply other_stride = op;
  other_stride.y_token_stride = 5;
  EXPECT_EQ(rope_apply(queue(), other_stride).code, Code::invalid_argument);
  EXPECT_EQ(rope_table(queue(), {.num_tokens = 1, .half_dim = 1, .acc = DType::bf16}).code, Code::invalid_argument);
}

OOMB_ON_ALL_DEVICES(RopeTest);

}  // namespace
}  // namespace oomb::kernels::testing
