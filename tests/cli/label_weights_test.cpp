// A step over sequences with different numbers of labels: every label counts the same, whichever sequence it is in.
//
// From the command line all sequences of a step have equally many labels, so this goes to the pipeline itself.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/worker/oracle.h"

namespace oomb::test {
namespace {

constexpr int64_t kIgnored = -100;
constexpr int64_t kSymbols = 4;

struct Example {
  std::vector<int64_t> ids, labels;
};

// Layers put out zero and token t has the embedding e_t, so a token's logits are a column of the head.
class LabelWeights : public ::testing::Test {
 protected:
  LabelWeights() : rig_(config(), options(), {at::kDouble, at::Device(at::kCPU)}, 16, 1) {
    for (model::Parameter& p : rig_.parameters.all()) p.weight.zero_();
    rig_.parameters.final_norm().weight.fill_(1);
    rig_.parameters.embedding().weight.copy_(at::eye(kSymbols, at::kDouble));
  }

  static model::ModelConfig config() {
    model::ModelConfig c = small_config(2, 1, false, 1);
    c.hidden_size = kSymbols;
    c.vocab_size = kSymbols;
    c.rms_norm_eps = 0;
    return c;
  }

  static PipelineOptions options() {
    PipelineOptions o;
    o.chunk_tokens = 2;
    o.selection.page_tokens = 1;
    o.selection.query_tile = 1;
    o.selection.dense = true;
    o.gradient_dtype = at::kDouble;
    return o;
  }

  // Makes `loss` the loss of `label` after `token`. The norm turns e_t into sqrt(H) e_t = 2 e_t.
  void set_loss(int64_t token, int64_t label, double loss) {
    constexpr double kNever = -1e4;
    for (int64_t row = 0; row < kSymbols; ++row)
      rig_.parameters.head().weight.index_put_({at::tensor(row), at::tensor(token)},
                                               at::scalar_tensor(kNever / 2, at::kDouble));
    const auto put = [&](int64_t row, double logit) {
      rig_.parameters.head().weight.index_put_({at::tensor(row), at::tensor(token)},
                                               at::scalar_tensor(logit / 2, at::kDouble));
    };
    put(label, 0);
    if (loss > 0) put((label + 1) % kSymbols, std::log(std::expm1(loss)));
  }

  double step(const std::vector<Example>& sequences, double scale) {
    rig_.parameters.zero_gradients();
    double sum = 0;
    for (const Example& e : sequences) sum += rig_.pipeline.train(e.ids, e.labels, scale).loss_sum;
    return sum * scale;
  }

  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> copy;
    for (const model::Parameter& p : rig_.parameters.all()) copy[p.name] = p.grad.clone();
    return copy;
  }

  // The gradient of a step over both is the mean of theirs, weighted by their labels.
  void expect_weighted(const Example& a, double labels_a, const Example& b, double labels_b) {
    step({a}, 1 / labels_a);
    const auto of_a = gradients();
    step({b}, 1 / labels_b);
    const auto of_b = gradients();
    step({a, b}, 1 / (labels_a + labels_b));
    double largest = 0;
    for (const auto& [name, both] : gradients()) {
      const at::Tensor expected = (labels_a * of_a.at(name) + labels_b * of_b.at(name)) / (labels_a + labels_b);
      EXPECT_LE((both - expected).norm().item<double>(), 1e-13 * std::max(expected.norm().item<double>(), 1e-3))
          << name;
      largest = std::max(largest, both.norm().item<double>());
    }
    EXPECT_GT(largest, 0.1);
  }

  Rig rig_;
};

TEST_F(LabelWeights, OneLabelOfFourAndThreeOfZero) {
  set_loss(0, 1, 4);
  set_loss(2, 3, 0);
  const Example one{{0, 1}, {1, kIgnored}};
  const Example three{{2, 2, 2, 3}, {3, 3, 3, kIgnored}};
  EXPECT_NEAR(step({one}, 1), 4.0, 1e-12);
  EXPECT_NEAR(step({three}, 1.0 / 3), 0.0, 1e-12);
  EXPECT_NEAR(step({one, three}, 1.0 / 4), 1.0, 1e-12);  // a mean of means is 2
  expect_weighted(one, 1, three, 3);
}

TEST_F(LabelWeights, FourLabelsOfOneAndOneOfFive) {
  set_loss(0, 1, 1);
  set_loss(2, 3, 5);
  const Example four{{0, 0, 0, 0, 3}, {1, 1, 1, 1, kIgnored}};
  const Example one{{2, 3, 0}, {3, kIgnored, kIgnored}};
  EXPECT_NEAR(step({four, one}, 1.0 / 5), 1.8, 1e-12);  // a mean of means is 3
  expect_weighted(four, 4, one, 1);
}

// The one valid label of 8 tokens, wherever it is: its gradient is not divided by chunks or sequences.
TEST_F(LabelWeights, OneLabelOfEightTokens) {
  for (int64_t at = 0; at < 8; ++at) {
    SCOPED_TRACE(at);
    set_loss(0, 1, 2);
    Example e{std::vector<int64_t>(8, 0), std::vector<int64_t>(8, kIgnored)};
    e.labels[static_cast<size_t>(at)] = 1;
    EXPECT_NEAR(step({e}, 1), 2.0, 1e-12);
    // d loss / d logits = p - onehot, times the normed input of 2.
    const double p = std::exp(-2.0);
    const at::Tensor head = rig_.parameters.head().grad;
    EXPECT_NEAR(head.select(0, 1).select(0, 0).item<double>(), 2 * (p - 1), 1e-12);
    EXPECT_NEAR(head.select(0, 2).select(0, 0).item<double>(), 2 * (1 - p), 1e-12);
    EXPECT_NEAR(head.norm().item<double>(), 2 * (1 - p) * std::sqrt(2.0), 1e-12);
  }
}

}  // namespace
}  // namespace oomb::test
