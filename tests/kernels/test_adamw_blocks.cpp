// AdamW with coded moments, without a master, or both, against an evaluation in double of one step from the state that
// was read back: the new moments and weights must be one of the two neighbours of the exact ones.
#include <algorithm>
#include <numeric>

#include "kernels/adamw.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 83, kKey = 0x9e3779b97f4a7c15ULL;

struct Form {
  Moments moments;
  bool master;
  DType weight_type;
};
constexpr Form kForms[] = {{Moments::acc, false, DType::bf16},
                           {Moments::int8, true, DType::bf16},
                           {Moments::int8, true, DType::f32},
                           {Moments::int8, false, DType::bf16}};

std::string text(const Form& f) {
  return std::string(f.moments == Moments::int8 ? "int8" : "acc") + (f.master ? ", master, " : ", no master, ") +
         name_of(f.weight_type);
}

std::vector<double> zeros(int64_t n) { return std::vector<double>(static_cast<size_t>(n), 0.0); }

/// The code's value by its definition.
double value_of(int64_t code, double scale) {
  if (code == 0) return 0;
  return scale * (1 + static_cast<double>((code - 1) % 8) / 8) * std::ldexp(1.0, static_cast<int>((code - 1) / 8));
}

/// State of one parameter; with a shift no pointer is aligned.
struct State {
  Form form;
  int64_t n, shift;
  Buffer master, grad, m, v, weight, m_scale, v_scale;
  Items<uint8_t> m_code, v_code;

  State(Device device, Form f, int64_t count, int64_t s, const std::vector<double>& w, const std::vector<double>& g)
      : form(f),
        n(count),
        shift(s),
        master(device, DType::f32, f.master ? w : std::vector<double>{}, s),
        grad(device, DType::f32, g, s),
        m(device, DType::f32, zeros(f.moments == Moments::acc ? count : 0), s),
        v(device, DType::f32, zeros(f.moments == Moments::acc ? count : 0), s),
        weight(device, f.weight_type, w, s),
        m_scale(device, DType::f32, zeros(num_moment_blocks(count))),
        v_scale(device, DType::f32, zeros(num_moment_blocks(count))),
        m_code(device, std::vector<uint8_t>(static_cast<size_t>(count + s), 0)),
        v_code(device, std::vector<uint8_t>(static_cast<size_t>(count + s), 0)) {}

  AdamW op(int64_t begin, int64_t end, int64_t step) const {
    const auto at = [&](const Buffer& b) { return static_cast<char*>(b.data()) + begin * size_of(b.type()); };
    const bool coded = form.moments == Moments::int8;
    return {.num_elements = end - begin,
            .lr = 3e-3,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .weight_decay = 0.1,
            .grad_scale = 0.5,
            .step = step,
            .master = form.master ? at(master) : nullptr,
            .grad = at(grad),
            .m = coded ? static_cast<void*>(m_code.data() + shift + begin) : at(m),
            .v = coded ? static_cast<void*>(v_code.data() + shift + begin) : at(v),
            .weight = at(weight),
            .weight_dtype = form.weight_type,
            .moments = form.moments,
            .m_scale = coded ? static_cast<float*>(m_scale.data()) + begin / kMomentBlock : nullptr,
            .v_scale = coded ? static_cast<float*>(v_scale.data()) + begin / kMomentBlock : nullptr,
            .random_key = kKey,
            .first_element = begin};
  }

  std::vector<double> moments_m() const {
    if (form.moments == Moments::acc) return m.read();
    const auto codes = m_code.read();
    const auto scales = m_scale.read();
    std::vector<double> values;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t code = codes[static_cast<size_t>(i + shift)];
      const double magnitude = value_of(code & 0x7f, scales[static_cast<size_t>(i / kMomentBlock)]);
      values.push_back((code & 0x80) != 0 ? -magnitude : magnitude);
    }
    return values;
  }
  std::vector<double> moments_v() const {
    if (form.moments == Moments::acc) return v.read();
    const auto codes = v_code.read();
    const auto scales = v_scale.read();
    std::vector<double> values;
    for (int64_t i = 0; i < n; ++i) {
      values.push_back(value_of(codes[static_cast<size_t>(i + shift)], scales[static_cast<size_t>(i / kMomentBlock)]));
    }
    return values;
  }
  std::vector<double> weights() const { return form.master ? master.read() : weight.read(); }

  std::vector<std::vector<unsigned char>> bits() const {
    return {master.read_bytes(),  m.read_bytes(),       v.read_bytes(), weight.read_bytes(),
            m_scale.read_bytes(), v_scale.read_bytes(), m_code.read(),  v_code.read()};
  }
};

State random_state(Device device, const Form& form, int64_t n, int64_t shift = 0) {
  return {device, form, n, shift, rounded_values(normal_values(n, kSeed), DType::bf16), normal_values(n, kSeed + 1)};
}

/// |got - exact| for a value rounded to a neighbour; `scale` is the least code's value, v is lifted to it.
void expect_neighbour(double got, double exact, double scale, bool lifted, size_t at) {
  const double slack = 1e-6 * std::fabs(exact);
  if (std::fabs(exact) >= scale) {
    EXPECT_LE(std::fabs(got - exact), std::fabs(exact) / 8 + slack) << at;
  } else if (lifted && exact > 0) {
    EXPECT_EQ(got, scale) << at;
  } else {
    EXPECT_TRUE(got == 0 || std::fabs(got) == scale) << at << ": " << got;
    EXPECT_GE(got * exact, 0) << at;
  }
}

class AdamWBlocksTest : public DeviceTest {};

TEST_P(AdamWBlocksTest, FollowsTheFormula) {
  for (const Form& form : kForms) {
    for (const auto& [n, shift] :
         {std::pair<int64_t, int64_t>{1, 0}, {7, 1}, {255, 0}, {256, 1}, {257, 0}, {1021, 0}, {33001, 0}, {5003, 1}}) {
      SCOPED_TRACE(::testing::Message() << text(form) << " n " << n << " shift " << shift << " seed " << kSeed);
      const State s = random_state(device(), form, n, shift);
      const auto grad = s.grad.read();
      for (int64_t step = 1; step <= 4; ++step) {
        auto w = s.weights(), m = s.moments_m(), v = s.moments_v();
        const AdamW op = s.op(0, n, step);
        ASSERT_OK(adamw_step(queue(), op));
        const auto new_w = s.weights(), new_m = s.moments_m(), new_v = s.moments_v();
        const auto m_scale = s.m_scale.read(), v_scale = s.v_scale.read();
        for (size_t i = 0; i < w.size(); ++i) {
          const double g = grad[i] * op.grad_scale, t = static_cast<double>(step);
          m[i] = op.beta1 * m[i] + (1 - op.beta1) * g;
          v[i] = op.beta2 * v[i] + (1 - op.beta2) * g * g;
          const double ratio =
              m[i] / (1 - std::pow(op.beta1, t)) / (std::sqrt(v[i] / (1 - std::pow(op.beta2, t))) + op.eps);
          w[i] -= op.lr * (op.weight_decay * w[i] + ratio);
          if (form.moments == Moments::int8) {
            expect_neighbour(new_m[i], m[i], m_scale[i / kMomentBlock], false, i);
            expect_neighbour(new_v[i], v[i], v_scale[i / kMomentBlock], true, i);
          }
          // Of bf16 the neighbours are 2^-7 of a value apart at most.
          if (!form.master) {
            EXPECT_LE(std::fabs(new_w[i] - w[i]), std::ldexp(std::fabs(w[i]), -7) + 1e-7) << i;
          }
        }
        if (form.moments == Moments::acc) {
          EXPECT_NEAR_ALL(new_m, m, 1e-9, 1e-6);
          EXPECT_NEAR_ALL(new_v, v, 1e-12, 1e-6);
        }
        if (form.master) {
          EXPECT_NEAR_ALL(new_w, w, 1e-8, 1e-6);
          EXPECT_NEAR_ALL(s.weight.read(), rounded_values(new_w, form.weight_type), 0, 0);
        }
      }
      // What lies before a shifted start is untouched.
      if (shift > 0) {
        EXPECT_EQ(s.m_code.read()[0] | s.v_code.read()[0], 0);
      }
    }
  }
}

TEST_P(AdamWBlocksTest, PiecesGiveTheSameBits) {
  const int64_t n = 20 * kMomentBlock + 77, blocks = num_moment_blocks(n);
  for (const Form& form : kForms) {
    std::vector<std::vector<unsigned char>> whole;
    for (const int64_t pieces : {1, 2, 7}) {
      const State s = random_state(device(), form, n);
      for (int64_t step = 1; step <= 20; ++step) {
        for (int64_t p = 0; p < pieces; ++p) {
          const int64_t begin = blocks * p / pieces * kMomentBlock;
          ASSERT_OK(adamw_step(queue(), s.op(begin, std::min(blocks * (p + 1) / pieces * kMomentBlock, n), step)));
        }
      }
      if (pieces == 1) whole = s.bits();
      EXPECT_EQ(s.bits(), whole) << text(form) << ", " << pieces << " pieces";
    }
  }
}

TEST_P(AdamWBlocksTest, DevicesGiveTheSameBits) {
  if (device() == Device::cpu) return;  // the CUDA case runs both
  const int64_t n = 100003;
  for (const Form& form : kForms) {
    for (const int64_t shift : {0, 1}) {
      const State here = random_state(device(), form, n, shift), twin = random_state(Device::cpu, form, n, shift);
      for (int64_t step = 1; step <= 10; ++step) {
        ASSERT_OK(adamw_step(queue(), here.op(0, n, step)));
        ASSERT_OK(adamw_step(Queue{}, twin.op(0, n, step)));
      }
      EXPECT_EQ(here.bits(), twin.bits()) << text(form) << " shift " << shift;
    }
  }
}

TEST_P(AdamWBlocksTest, StepAndKeyChangeTheBits) {
  const int64_t n = 4096;
  std::vector<std::vector<double>> results;
  for (const auto& [key, first] : {std::pair<uint64_t, int64_t>{kKey, 0}, {kKey + 1, 0}, {kKey, kMomentBlock}}) {
    const State s = random_state(device(), kForms[3], n);
    AdamW op = s.op(0, n, 1);
    op.random_key = key;
    op.first_element = first;
    ASSERT_OK(adamw_step(queue(), op));
    results.push_back(s.weights());
  }
  EXPECT_NE(results[0], results[1]);
  EXPECT_NE(results[0], results[2]);
}

double mean(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

TEST_P(AdamWBlocksTest, SmallUpdatesAreNotLost) {
  // 400 steps of 1e-4 from 1: half a bf16 step is 2e-3, so rounding to nearest would stay at 1 for ever. The spread of
  // one weight is below 0.01 x sqrt(400 x 0.05) ~ 0.02, that of the mean of 8,192 below 3e-4.
  const int64_t n = 8192;
  const State s(device(), kForms[3], n, 0, std::vector<double>(n, 1.0), std::vector<double>(n, 0.25));
  for (int64_t step = 1; step <= 400; ++step) {
    AdamW op = s.op(0, n, step);
    op.lr = 1e-4;
    op.weight_decay = 0;
    ASSERT_OK(adamw_step(queue(), op));
  }
  EXPECT_NEAR(mean(s.weight.read()), 0.96, 1.5e-3);
}

TEST_P(AdamWBlocksTest, MomentsDecayAndKeepTheirMean) {
  // beta2 = 0.999 changes a second moment by a sixtieth of a code: rounded to nearest it would never decay while one
  // element of the block keeps the scale up. Without gradient v falls as 0.999^t, whose mean SR must keep.
  const int64_t n = 64 * kMomentBlock;
  std::vector<double> spike = std::vector<double>(n, 1.0), later = zeros(n);
  for (int64_t i = 0; i < n; i += kMomentBlock) spike[static_cast<size_t>(i)] = later[static_cast<size_t>(i)] = 4.0;
  const State first(device(), kForms[3], n, 0, zeros(n), spike);
  const Buffer grad = input(DType::f32, later);
  for (int64_t step = 1; step <= 500; ++step) {
    AdamW op = first.op(0, n, step);
    op.beta2 = 0.999;
    op.grad_scale = 1;
    if (step > 1) op.grad = grad.data();
    ASSERT_OK(adamw_step(queue(), op));
  }
  std::vector<double> v = first.moments_v();
  for (int64_t i = n - kMomentBlock; i >= 0; i -= kMomentBlock) v.erase(v.begin() + i);
  const double expected = 1e-3 * std::pow(0.999, 499.0);
  // A walk of 499 steps, each with a deviation below a quarter of a code's width (1/8): 0.03 x sqrt(499 x 0.02) per
  // element, 16,320 elements.
  EXPECT_NEAR(mean(v) / expected, 1.0, 0.01);
}

TEST_P(AdamWBlocksTest, NoStepExplodes) {
  // Gradients over 60 octaves within a block, most of them below what its scale reaches, changing place at every step.
  // |m^ / sqrt(v^)| <= 1.17 for these betas; coding m upwards to its least value over a v of its least adds at most
  // a factor 2.2. A v that fell to 0 would give m / eps = 1e5 and more.
  const int64_t n = 3 * kMomentBlock + 11;
  std::mt19937_64 engine(kSeed);
  std::uniform_real_distribution<double> octave(-40, 20), sign(-1, 1);
  const State s(device(), {Moments::int8, true, DType::f32}, n, 0, zeros(n), zeros(n));
  std::vector<double> scales(static_cast<size_t>(n));
  for (double& x : scales) x = std::exp2(octave(engine));
  double largest = 0;
  for (int64_t step = 1; step <= 100; ++step) {
    std::vector<double> values;
    for (int64_t i = 0; i < n; ++i) values.push_back(scales[static_cast<size_t>(i)] * sign(engine));
    const Buffer grad = input(DType::f32, values);
    const auto before = s.weights();
    AdamW op = s.op(0, n, step);
    op.grad = grad.data();
    op.lr = 1;
    op.eps = 1e-15;
    op.weight_decay = 0;
    ASSERT_OK(adamw_step(queue(), op));
    const auto after = s.weights();
    for (size_t i = 0; i < before.size(); ++i) largest = std::max(largest, std::fabs(after[i] - before[i]));
  }
  EXPECT_LT(largest, 2.6);
  EXPECT_GT(largest, 0.5);
}

TEST_P(AdamWBlocksTest, ExtremeValuesAndNonFiniteOnes) {
  // Zero gradients leave zero moments; an overflow of g^2 marks its block, and only that.
  const int64_t n = 2 * kMomentBlock + 1;
  std::vector<double> g = zeros(n);
  g[kMomentBlock] = 1e25;
  g[n - 1] = 1e-25;  // g^2 is 0 in fp32
  const State s(device(), kForms[3], n, 0, std::vector<double>(n, 3.3895313892515355e38), g);
  AdamW op = s.op(0, n, 1);
  op.weight_decay = 0;
  ASSERT_OK(adamw_step(queue(), op));
  const auto v_scale = s.v_scale.read(), m_scale = s.m_scale.read(), m = s.moments_m(), v = s.moments_v(),
             w = s.weights();
  EXPECT_EQ(m[0], 0);
  EXPECT_EQ(v[0], 0);
  EXPECT_TRUE(std::isfinite(v_scale[0]) && std::isfinite(v_scale[2]));
  EXPECT_TRUE(std::isnan(v_scale[1]));
  EXPECT_TRUE(std::isfinite(m_scale[1]));
  EXPECT_NEAR(m[static_cast<size_t>(n - 1)], 5e-27, 5e-27 / 8);
  EXPECT_EQ(w[0], 3.3895313892515355e38);  // the largest bf16 stays finite
}

TEST_P(AdamWBlocksTest, RefusesWhatItCannotDo) {
  const State s = random_state(device(), kForms[3], 10);
  const AdamW good = s.op(0, 10, 1);
  ASSERT_OK(adamw_step(queue(), good));
  const auto refused = [&](auto change) {
    AdamW op = good;
    change(op);
    EXPECT_EQ(adamw_step(queue(), op).code, Code::invalid_argument);
  };
  refused([](AdamW& op) { op.acc = DType::f64; });
  refused([](AdamW& op) { op.first_element = 128; });
  refused([](AdamW& op) { op.first_element = -256; });
  refused([](AdamW& op) { op.weight = nullptr; });
  refused([](AdamW& op) { op.weight_dtype = DType::f32; });
  refused([](AdamW& op) { op.m_scale = nullptr; });
  refused([](AdamW& op) { op.v_scale = nullptr; });
}

OOMB_ON_ALL_DEVICES(AdamWBlocksTest);

}  // namespace
}  // namespace oomb::kernels::testing
