// Softmax cross-entropy against its formula in double.
#include <algorithm>

#include "kernels/cross_entropy.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 59;

class CrossEntropyTest : public DeviceTest {};

struct Shape {
  int64_t rows, vocab, stride, shift;
};
// Rows that start off 16 bytes (odd strides), a row shorter than a pack, and Qwen2.5's vocabulary.
const Shape kShapes[] = {{1, 1, 1, 0},     {5, 7, 7, 0},       {4, 3, 11, 1},         {37, 127, 131, 0},
                         {9, 256, 256, 0}, {3, 5003, 5005, 1}, {2, 152064, 152064, 0}};

struct Expected {
  std::vector<double> loss, gradient;
};

Expected reference(const Shape& s, const std::vector<double>& logits, const std::vector<int64_t>& labels,
                   double scale) {
  Expected e{{}, logits};
  for (int64_t i = 0; i < s.rows; ++i) {
    const double* x = logits.data() + i * s.stride;
    double* g = e.gradient.data() + i * s.stride;
    const int64_t label = labels[static_cast<size_t>(i)];
    if (label == kIgnoredLabel) {
      e.loss.push_back(0);
      std::fill(g, g + s.vocab, 0.0);
      continue;
    }
    const double top = *std::max_element(x, x + s.vocab);
    long double total = 0;  // 152,064 terms in double would be the less exact side
    for (int64_t j = 0; j < s.vocab; ++j) total += std::exp(x[j] - top);
    const double sum = static_cast<double>(total);
    e.loss.push_back(std::log(sum) + top - x[label]);
    for (int64_t j = 0; j < s.vocab; ++j) g[j] = scale * (std::exp(x[j] - top) / sum - (j == label ? 1.0 : 0.0));
  }
  return e;
}

TEST_P(CrossEntropyTest, LossAndGradient) {
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    const double u = unit_roundoff(acc);
    for (const Shape& s : kShapes) {
      for (const double offset : {0.0, 400.0, -3000.0}) {
        SCOPED_TRACE(::testing::Message() << name_of(type) << " " << s.rows << "x" << s.vocab << " stride " << s.stride
                                          << " offset " << offset << " seed " << kSeed);
        auto values = normal_values(s.rows * s.stride, kSeed, 3.0);
        for (double& v : values) v += offset;
        values = rounded_values(values, type);
        std::vector<int64_t> labels;
        for (int64_t i = 0; i < s.rows; ++i) {
          labels.push_back(i % 4 == 3 ? kIgnoredLabel : (i * 7919 + s.vocab - 1) % s.vocab);
          for (int64_t j = s.vocab; j < s.stride; ++j) values[static_cast<size_t>(i * s.stride + j)] = std::nan("");
        }
        const double scale = 1.0 / 37;
        const Buffer logits = input(type, values, s.shift), loss = output(acc, s.rows);
        const auto label_items = items(labels);
        CrossEntropy op{s.rows, s.vocab, s.stride, type, scale, false, logits.data(), label_items.data(), loss.data()};
        const Expected e = reference(s, values, labels, scale);
        const double loss_bound = u * (4 * std::fabs(offset) + 128);

        ASSERT_OK(cross_entropy(queue(), op));
        EXPECT_NEAR_ALL(loss.read(), e.loss, loss_bound, 0);
        EXPECT_NEAR_ALL(logits.read(), values, 0, 0);

        op.write_grad = true;
        ASSERT_OK(cross_entropy(queue(), op));
        EXPECT_NEAR_ALL(loss.read(), e.loss, loss_bound, 0);
        auto actual = logits.read(), expected = e.gradient;
        // The label's element is a difference of about 1; the others are small and relatively exact.
        std::vector<double> at_label, at_label_expected;
        for (int64_t i = 0; i < s.rows; ++i) {
          if (labels[static_cast<size_t>(i)] == kIgnoredLabel) continue;
          const size_t at = static_cast<size_t>(i * s.stride + labels[static_cast<size_t>(i)]);
          at_label.push_back(actual[at]);
          at_label_expected.push_back(expected[at]);
          actual[at] = expected[at] = 0;
        }
        const double tiny = type == DType::f64 ? 1e-300 : 1e-36;
        EXPECT_NEAR_ALL(actual, expected, tiny, unit_roundoff(type) * 1.01 + 64 * u);
        EXPECT_NEAR_ALL(at_label, at_label_expected, scale * 8 * u, unit_roundoff(type) * 1.01);
      }
    }
  }
}

TEST_P(CrossEntropyTest, MaskedLogitsAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const DType type : kAllTypes) {
    // Row 0: all but three masked. Row 1: a NaN. Row 2: the label itself is masked.
    const int64_t vocab = 41;
    std::vector<double> values(3 * static_cast<size_t>(vocab), -inf);
    values[0] = 1, values[17] = 1, values[40] = 1;
    for (int64_t j = 0; j < vocab; ++j) values[static_cast<size_t>(vocab + j)] = 0.5;
    values[static_cast<size_t>(vocab) + 20] = std::nan("");
    values[static_cast<size_t>(2 * vocab) + 5] = 0;
    const Buffer logits = input(type, values), loss = output(accumulator_of(type), 3);
    const auto labels = items<int64_t>({17, 3, 4});
    ASSERT_OK(cross_entropy(queue(), {3, vocab, vocab, type, 1.0, true, logits.data(), labels.data(), loss.data()}));
    const auto losses = loss.read(), grads = logits.read();
    EXPECT_NEAR(losses[0], std::log(3.0), 4 * unit_roundoff(accumulator_of(type)));
    EXPECT_TRUE(std::isnan(losses[1]));
    EXPECT_EQ(losses[2], inf);
    EXPECT_NEAR(grads[0], 1.0 / 3, 2 * unit_roundoff(type));
    EXPECT_NEAR(grads[17], -2.0 / 3, 2 * unit_roundoff(type));
    EXPECT_EQ(grads[1], 0);
    EXPECT_EQ(grads[static_cast<size_t>(2 * vocab) + 4], -1);
  }
}

TEST_P(CrossEntropyTest, LabelOutsideTheVocabulary) {
  for (const int64_t label : {int64_t{3}, int64_t{-1}, int64_t{1} << 40}) {
    const Buffer logits = input(DType::f32, {1, 2, 3}), loss = output(DType::f32, 1);
    const auto labels = items<int64_t>({label});
    const Status status =
        cross_entropy(queue(), {1, 3, 3, DType::f32, 1.0, true, logits.data(), labels.data(), loss.data()});
    if (device() == Device::cpu) {
      EXPECT_EQ(status.code, Code::invalid_argument);
    } else {
      EXPECT_OK(status);  // found out on the device: the loss says it
      EXPECT_TRUE(std::isnan(loss.read()[0]));
    }
    EXPECT_NEAR_ALL(logits.read(), (std::vector<double>{1, 2, 3}), 0, 0);
  }
}

TEST_P(CrossEntropyTest, RefusesWhatItCannotDo) {
  EXPECT_OK(cross_entropy(queue(), {.num_rows = 0, .vocab = 3, .row_stride = 3}));
  EXPECT_EQ(cross_entropy(queue(), {.num_rows = 1, .vocab = 3, .row_stride = 2}).code, Code::invalid_argument);
  EXPECT_EQ(cross_entropy(queue(), {.num_rows = 1, .vocab = 3, .row_stride = 3}).code, Code::invalid_argument);
}

OOMB_ON_ALL_DEVICES(CrossEntropyTest);

}  // namespace
}  // namespace oomb::kernels::testing
