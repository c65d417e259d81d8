// lse_merge against a plain evaluation in double, its limits (rows without keys), and the error of long merges.
#include <array>

#include "kernels/lse_merge.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

using Values = std::vector<double>;
constexpr double kNone = -std::numeric_limits<double>::infinity();

struct Case {
  int64_t kv_heads, tokens, group, dim;
  DType a, b, out;
  bool token_major = false, without_b = false, shifted = false;
};

class LseMergeTest : public DeviceTest {
 protected:
  void check(const Case& c) {
    SCOPED_TRACE(::testing::Message() << name_of(c.a) << "+" << name_of(c.b) << "->" << name_of(c.out) << " Hkv "
                                      << c.kv_heads << " C " << c.tokens << " G " << c.group << " D " << c.dim
                                      << " token_major " << c.token_major << " without_b " << c.without_b);
    const bool f64 = c.a == DType::f64 || (!c.without_b && c.b == DType::f64) || c.out == DType::f64;
    const DType acc = f64 ? DType::f64 : DType::f32;
    const int64_t rows = c.kv_heads * c.tokens * c.group, count = rows * c.dim;
    Values o_a = rounded_values(normal_values(count, 31), c.a), o_b = rounded_values(normal_values(count, 32), c.b);
    Values lse_a = rounded_values(normal_values(rows, 33, 8.0), acc),
           lse_b = rounded_values(normal_values(rows, 34, 8.0), acc);
    for (int64_t row = 0; row < rows; ++row) {  // a row without keys in a, in b, in both; what O holds there is poison
      const bool no_a = row % 5 == 1 || row % 5 == 3, no_b = row % 5 == 2 || row % 5 == 3;
      if (no_a) lse_a[static_cast<size_t>(row)] = kNone;
      if (no_b) lse_b[static_cast<size_t>(row)] = kNone;
      for (int64_t d = 0; d < c.dim; ++d) {
        if (no_a) o_a[static_cast<size_t>(row * c.dim + d)] = std::nan("");
        if (no_b) o_b[static_cast<size_t>(row * c.dim + d)] = std::nan("");
      }
    }
    Values expected(static_cast<size_t>(count)), expected_lse(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) {
      const double a = lse_a[static_cast<size_t>(row)], b = c.without_b ? kNone : lse_b[static_cast<size_t>(row)];
      const double sum = std::exp(a) + std::exp(b);
      expected_lse[static_cast<size_t>(row)] = std::log(sum);
      const int64_t g = row % c.group, t = row / c.group % c.tokens, h = row / c.group / c.tokens;
      const int64_t to = c.token_major ? (t * c.kv_heads + h) * c.group + g : row;
      for (int64_t d = 0; d < c.dim; ++d) {
        const size_t from = static_cast<size_t>(row * c.dim + d);
        const double x =
            (a == kNone ? 0 : std::exp(a) / sum * o_a[from]) + (b == kNone ? 0 : std::exp(b) / sum * o_b[from]);
        expected[static_cast<size_t>(to * c.dim + d)] = x;
      }
    }
    const int64_t shift = c.shifted ? 1 : 0;
    const Buffer a_in = input(c.a, o_a, shift), b_in = input(c.b, o_b, shift);
    const Buffer la = input(acc, lse_a), lb = input(acc, lse_b);
    const Buffer out = output(c.out, count, shift), lse = output(acc, rows);
    LseMerge op{c.kv_heads, c.tokens, c.group, c.dim, c.a, c.b, c.out, acc};
    op.o_a = a_in.data();
    op.lse_a = la.data();
    if (!c.without_b) op.o_b = b_in.data();
    if (!c.without_b) op.lse_b = lb.data();
    op.out = out.data();
    op.token_major = c.token_major;
    op.lse = lse.data();
    ASSERT_OK(lse_merge(queue(), op));
    // Weights are exp of a difference of numbers near 30, each with a rounding error of 30 u.
    const double u = unit_roundoff(acc);
    EXPECT_NEAR_ALL(out.read(), expected, 200 * u, unit_roundoff(c.out) + 200 * u);
    EXPECT_NEAR_ALL(lse.read(), expected_lse, 8 * u, 4 * u);
  }
};

TEST_P(LseMergeTest, AllTypes) {
  for (const DType a : kAllTypes) {
    for (const DType b : kAllTypes) {
      for (const DType out : kAllTypes) {
        check({2, 7, 3, 16, a, b, out});
        check({2, 7, 3, 5, a, b, out, true});
      }
    }
  }
}

TEST_P(LseMergeTest, Shapes) {
  for (const int64_t dim : {1, 2, 7, 8, 24, 64, 128, 256, 264, 300}) {
    for (const bool token_major : {false, true}) {
      for (const bool shifted : {false, true}) {
        check({1, 1, 1, dim, DType::f32, DType::bf16, DType::bf16, token_major, false, shifted});
        check({3, 13, 7, dim, DType::f32, DType::bf16, DType::f32, token_major, false, shifted});
        check({3, 13, 7, dim, DType::bf16, DType::bf16, DType::bf16, token_major, true, shifted});
      }
    }
  }
}

// out may be o_a and lse may be lse_a: the running merge over many sets.
TEST_P(LseMergeTest, InPlace) {
  for (const int64_t dim : {8, 13}) {
    const int64_t rows = 2 * 11 * 3;
    const Buffer a = input(DType::f32, normal_values(rows * dim, 41)), la = input(DType::f32, normal_values(rows, 42));
    const Buffer b = input(DType::bf16, normal_values(rows * dim, 43)), lb = input(DType::f32, normal_values(rows, 44));
    const Buffer out = output(DType::f32, rows * dim), lse = output(DType::f32, rows);
    LseMerge op{2, 11, 3, dim, DType::f32, DType::bf16, DType::f32, DType::f32};
    op.o_a = a.data(), op.lse_a = la.data(), op.o_b = b.data(), op.lse_b = lb.data();
    op.out = out.data(), op.lse = lse.data();
    ASSERT_OK(lse_merge(queue(), op));
    op.out = a.data(), op.lse = la.data();
    ASSERT_OK(lse_merge(queue(), op));
    EXPECT_EQ(a.read(), out.read());
    EXPECT_EQ(la.read(), lse.read());
  }
}

// Attention outputs of 1, 2, 4, 8 parts of the keys, each rounded to bf16, merged in fp32: the error against exact
// attention must not grow with the number of parts.
TEST_P(LseMergeTest, ErrorDoesNotGrowWithTheNumberOfSets) {
  constexpr int64_t kKeys = 64, kRows = 40, kDim = 16;
  const Values scores = normal_values(kRows * kKeys, 51, 2.0), values = normal_values(kKeys * kDim, 52);
  std::array<double, 9> worst{};
  for (const int64_t parts : {1, 2, 4, 8}) {
    Buffer running = input(DType::f32, Values(kRows * kDim, std::nan(""))),
           lse = input(DType::f32, Values(kRows, kNone));
    for (int64_t part = 0; part < parts; ++part) {
      Values o(kRows * kDim, 0.0), l(kRows, 0.0);
      for (int64_t r = 0; r < kRows; ++r) {
        double sum = 0;
        for (int64_t k = part * kKeys / parts; k < (part + 1) * kKeys / parts; ++k) {
          const double weight = std::exp(scores[static_cast<size_t>(r * kKeys + k)]);
          sum += weight;
          for (int64_t d = 0; d < kDim; ++d) {
            o[static_cast<size_t>(r * kDim + d)] += weight * values[static_cast<size_t>(k * kDim + d)];
          }
        }
        for (int64_t d = 0; d < kDim; ++d) o[static_cast<size_t>(r * kDim + d)] /= sum;
        l[static_cast<size_t>(r)] = std::log(sum);
      }
      const Buffer o_part = input(DType::bf16, o), l_part = input(DType::f32, l);
      LseMerge op{1, kRows, 1, kDim, DType::f32, DType::bf16, DType::f32, DType::f32};
      op.o_a = running.data(), op.lse_a = lse.data(), op.o_b = o_part.data(), op.lse_b = l_part.data();
      op.out = running.data(), op.lse = lse.data();
      ASSERT_OK(lse_merge(queue(), op));
      o_part.read();  // waits for the device
    }
    const Values merged = running.read();
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      Values exact(kDim, 0.0);
      for (int64_t k = 0; k < kKeys; ++k) {
        const double weight = std::exp(scores[static_cast<size_t>(r * kKeys + k)]);
        sum += weight;
        for (int64_t d = 0; d < kDim; ++d)
          exact[static_cast<size_t>(d)] += weight * values[static_cast<size_t>(k * kDim + d)];
      }
      for (int64_t d = 0; d < kDim; ++d) {
        worst[static_cast<size_t>(parts)] =
            std::max(worst[static_cast<size_t>(parts)],
                     std::fabs(merged[static_cast<size_t>(r * kDim + d)] - exact[static_cast<size_t>(d)] / sum));
      }
    }
  }
  EXPECT_GT(worst[1], 0.0);
  for (const size_t parts : {2, 4, 8}) EXPECT_LE(worst[parts], 1.2 * worst[1]) << parts << " parts";
}

TEST_P(LseMergeTest, BadArgumentsAreRefused) {
  const Buffer x = input(DType::f32, Values(8, 1.0));
  LseMerge op{1, 1, 1, 8, DType::f32, DType::f32, DType::f32, DType::f64};
  op.o_a = op.lse_a = x.data(), op.out = op.lse = x.data();
  EXPECT_EQ(lse_merge(queue(), op).code, Code::invalid_argument) << "acc f64 for f32 elements";
  op.acc = DType::f32;
  op.o_b = x.data();
  EXPECT_EQ(lse_merge(queue(), op).code, Code::invalid_argument) << "o_b without lse_b";
  op.o_b = nullptr;
  op.token_major = true;
  EXPECT_EQ(lse_merge(queue(), op).code, Code::invalid_argument) << "in place with another layout";
}

OOMB_ON_ALL_DEVICES(LseMergeTest);

}  // namespace
}  // namespace oomb::kernels::testing
