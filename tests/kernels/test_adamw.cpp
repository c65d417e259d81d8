// AdamW and the sum of squares.
#include "kernels/adamw.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 71;

class AdamWTest : public DeviceTest {};

struct State {
  Buffer master, grad, m, v, weight;

  State(Device device, DType acc, DType weight_type, int64_t n, int64_t shift)
      : master(device, acc, normal_values(n, kSeed), shift),
        grad(device, acc, normal_values(n, kSeed + 1), shift),
        m(device, acc, std::vector<double>(static_cast<size_t>(n), 0.0), shift),
        v(device, acc, std::vector<double>(static_cast<size_t>(n), 0.0), shift),
        weight(device, weight_type, std::vector<double>(static_cast<size_t>(n), std::nan("")), shift) {}

  AdamW op(int64_t begin, int64_t end, int64_t step) const {
    const auto at = [&](const Buffer& b) { return static_cast<char*>(b.data()) + begin * size_of(b.type()); };
    return {.num_elements = end - begin,
            .acc = master.type(),
            .lr = 3e-3,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .eps = 1e-8,
            .weight_decay = 0.1,
            .grad_scale = 0.5,
            .step = step,
            .master = at(master),
            .grad = at(grad),
            .m = at(m),
            .v = at(v),
            .weight = at(weight),
            .weight_dtype = weight.type()};
  }
};

TEST_P(AdamWTest, FollowsTheFormula) {
  for (const auto& [acc, weight_type] : {std::pair{DType::f64, DType::f64},
                                         {DType::f64, DType::f32},
                                         {DType::f32, DType::f32},
                                         {DType::f32, DType::bf16}}) {
    for (const auto& [n, shift] : {std::pair<int64_t, int64_t>{1, 0}, {7, 0}, {1021, 0}, {1024, 1}, {33000, 0}}) {
      SCOPED_TRACE(::testing::Message() << name_of(acc) << " -> " << name_of(weight_type) << " n " << n << " shift "
                                        << shift << " seed " << kSeed);
      const State s(device(), acc, weight_type, n, shift);
      auto w = s.master.read(), m = s.m.read(), v = s.v.read();
      const auto grad = s.grad.read();
      for (int64_t step = 1; step <= 5; ++step) {
        const AdamW op = s.op(0, n, step);
        ASSERT_OK(adamw_step(queue(), op));
        for (size_t i = 0; i < w.size(); ++i) {
          const double g = grad[i] * op.grad_scale, t = static_cast<double>(step);
          m[i] = op.beta1 * m[i] + (1 - op.beta1) * g;
          v[i] = op.beta2 * v[i] + (1 - op.beta2) * g * g;
          const double ratio =
              m[i] / (1 - std::pow(op.beta1, t)) / (std::sqrt(v[i] / (1 - std::pow(op.beta2, t))) + op.eps);
          w[i] -= op.lr * (op.weight_decay * w[i] + ratio);
        }
      }
      const double u = unit_roundoff(acc);
      EXPECT_NEAR_ALL(s.m.read(), m, 0, 32 * u);
      EXPECT_NEAR_ALL(s.v.read(), v, 0, 32 * u);
      EXPECT_NEAR_ALL(s.master.read(), w, 5 * 3e-3 * 32 * u, 8 * u);
      // The copy is the rounded master, bit for bit.
      EXPECT_NEAR_ALL(s.weight.read(), rounded_values(s.master.read(), weight_type), 0, 0);
    }
  }
}

TEST_P(AdamWTest, PiecesGiveTheSameBits) {
  const int64_t n = 10007;
  for (const DType acc : {DType::f32, DType::f64}) {
    std::vector<unsigned char> master_bits, m_bits, v_bits, weight_bits;
    for (const int64_t pieces : {1, 2, 7}) {
      const State s(device(), acc, acc == DType::f32 ? DType::bf16 : DType::f32, n, 0);
      for (int64_t step = 1; step <= 100; ++step) {
        for (int64_t p = 0; p < pieces; ++p) {
          ASSERT_OK(adamw_step(queue(), s.op(n * p / pieces, n * (p + 1) / pieces, step)));
        }
      }
      if (pieces == 1) {
        master_bits = s.master.read_bytes();
        m_bits = s.m.read_bytes();
        v_bits = s.v.read_bytes();
        weight_bits = s.weight.read_bytes();
      }
      EXPECT_EQ(s.master.read_bytes(), master_bits) << pieces << " pieces";
      EXPECT_EQ(s.m.read_bytes(), m_bits) << pieces << " pieces";
      EXPECT_EQ(s.v.read_bytes(), v_bits) << pieces << " pieces";
      EXPECT_EQ(s.weight.read_bytes(), weight_bits) << pieces << " pieces";
    }
  }
}

TEST_P(AdamWTest, DevicesGiveTheSameBits) {
  if (device() == Device::cpu) return;  // the CUDA case runs both
  const int64_t n = 100003;
  for (const DType acc : {DType::f32, DType::f64}) {
    const State here(device(), acc, DType::f32, n, 0), twin(Device::cpu, acc, DType::f32, n, 0);
    for (int64_t step = 1; step <= 10; ++step) {
      ASSERT_OK(adamw_step(queue(), here.op(0, n, step)));
      ASSERT_OK(adamw_step(Queue{}, twin.op(0, n, step)));
    }
    EXPECT_EQ(here.master.read_bytes(), twin.master.read_bytes());
    EXPECT_EQ(here.v.read_bytes(), twin.v.read_bytes());
  }
}

TEST_P(AdamWTest, StepCounterDoesNotStick) {
  // First moment off, one gradient of 1 at step 1000: m / sqrt(v / c) with c = 1 - 0.999^1000 = 0.63230, where a bf16
  // counter stuck at 256 would have 0.22596.
  const Buffer master = input(DType::f32, {0}), grad = input(DType::f32, {1}), m = input(DType::f32, {0});
  const Buffer v = input(DType::f32, {0});
  ASSERT_OK(adamw_step(queue(), {.num_elements = 1,
                                 .acc = DType::f32,
                                 .lr = 1,
                                 .beta1 = 0,
                                 .beta2 = 0.999,
                                 .eps = 0,
                                 .step = 1000,
                                 .master = master.data(),
                                 .grad = grad.data(),
                                 .m = m.data(),
                                 .v = v.data()}));
  const double correction = 1 - std::pow(0.999, 1000.0);
  EXPECT_NEAR(correction, 0.63230, 5e-6);
  EXPECT_NEAR(master.read()[0], -std::sqrt(correction / 0.001), 1e-4);
}

TEST_P(AdamWTest, WeightCopyIsOptionalAndTiesGoToEven) {
  // lr = 0 leaves the master as it is: 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between 1 + 2^-7 and 1 +
  // 2^-6.
  const Buffer master = input(DType::f32, {1 + 1.0 / 256, 1 + 3.0 / 256, -1 - 1.0 / 256, 1 + 1.01 / 256});
  const Buffer zero = input(DType::f32, {0, 0, 0, 0}), m = input(DType::f32, {0, 0, 0, 0}),
               v = input(DType::f32, {0, 0, 0, 0});
  const Buffer weight = output(DType::bf16, 4);
  AdamW op{.num_elements = 4, .master = master.data(), .grad = zero.data(), .m = m.data(), .v = v.data()};
  ASSERT_OK(adamw_step(queue(), op));
  op.weight = weight.data();
  ASSERT_OK(adamw_step(queue(), op));
  EXPECT_NEAR_ALL(weight.read(), (std::vector<double>{1, 1 + 4.0 / 256, -1, 1 + 2.0 / 256}), 0, 0);
}

TEST_P(AdamWTest, RefusesWhatItCannotDo) {
  const Buffer x = input(DType::f32, {1});
  AdamW op{.num_elements = 1, .master = x.data(), .grad = x.data(), .m = x.data(), .v = x.data()};
  EXPECT_OK(adamw_step(queue(), AdamW{}));
  AdamW step_zero = op;
  step_zero.step = 0;
  EXPECT_EQ(adamw_step(queue(), step_zero).code, Code::invalid_argument);
  AdamW beta = op;
  beta.beta2 = 1;
  EXPECT_EQ(adamw_step(queue(), beta).code, Code::invalid_argument);
  AdamW rate = op;
  rate.lr = std::nan("");
  EXPECT_EQ(adamw_step(queue(), rate).code, Code::invalid_argument);
  AdamW wide = op;
  wide.weight = x.data();
  wide.weight_dtype = DType::f64;
  EXPECT_EQ(adamw_step(queue(), wide).code, Code::invalid_argument);
}

TEST_P(AdamWTest, SumOfSquares) {
  for (const DType type : kAllTypes) {
    for (const auto& [n, shift] : {std::pair<int64_t, int64_t>{1, 0}, {5, 1}, {16383, 0}, {16385, 1}, {100003, 0}}) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " n " << n << " shift " << shift << " seed " << kSeed);
      const auto values = rounded_values(normal_values(n, kSeed), type);
      const Buffer x = input(type, values, shift), out = input(DType::f64, {10.0});
      const auto space = workspace(sum_of_squares_workspace_bytes(queue(), n));
      const SumOfSquares op{n, type, x.data(), static_cast<double*>(out.data()), space.data()};
      ASSERT_OK(sum_of_squares(queue(), op));
      long double expected = 10;
      for (const double v : values) expected += static_cast<long double>(v) * v;
      EXPECT_NEAR_ALL(out.read(), {static_cast<double>(expected)}, 0, 1e-14);

      // Off 16 bytes or not: the same bits.
      const Buffer moved = input(type, values, 1 - shift), again = input(DType::f64, {10.0});
      ASSERT_OK(sum_of_squares(queue(), {n, type, moved.data(), static_cast<double*>(again.data()), space.data()}));
      EXPECT_EQ(again.read_bytes(), out.read_bytes());
    }
  }
}

TEST_P(AdamWTest, SumOfSquaresOfHugeAndBadGradients) {
  // 1e30 squared is beyond float.
  const Buffer huge = input(DType::f32, {1e30, 1e30}), bad = input(DType::f32, {1, std::nan("")});
  const Buffer out = input(DType::f64, {0.0});
  const auto space = workspace(sum_of_squares_workspace_bytes(queue(), 2));
  ASSERT_OK(sum_of_squares(queue(), {2, DType::f32, huge.data(), static_cast<double*>(out.data()), space.data()}));
  EXPECT_NEAR(out.read()[0], 2e60, 1e54);
  ASSERT_OK(sum_of_squares(queue(), {2, DType::f32, bad.data(), static_cast<double*>(out.data()), space.data()}));
  EXPECT_TRUE(std::isnan(out.read()[0]));
}

OOMB_ON_ALL_DEVICES(AdamWTest);

}  // namespace
}  // namespace oomb::kernels::testing
