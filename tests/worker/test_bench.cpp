// What `oomb bench` rests on: its gradient check, its count of model FLOPs, its median.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "worker/bench/gradient_check.h"
#include "worker/bench/model_flops.h"
#include "worker/bench/statistics.h"

namespace oomb::bench {
namespace {

const at::Device kCpu(at::kCPU);

model::ModelConfig model_of(int64_t heads, int64_t kv_heads, int64_t dim, bool tied) {
  model::ModelConfig c;
  c.hidden_size = 1000;
  c.intermediate_size = 37;
  c.num_layers = 28;
  c.num_heads = heads;
  c.num_kv_heads = kv_heads;
  c.head_dim = dim;
  c.vocab_size = 61;
  c.tie_word_embeddings = tied;
  return c;
}

PipelineOptions options_of(int64_t chunk, int64_t page, int64_t tile, int64_t budget) {
  PipelineOptions o;
  o.chunk_tokens = chunk;
  o.selection.page_tokens = page;
  o.selection.query_tile = tile;
  o.selection.dense = budget < 0;
  o.selection.budget_pages = std::max<int64_t>(budget, 0);
  return o;
}

// Two parameter sets of one small model; `got` in the type under test, both with the same made-up gradients.
class Comparison : public ::testing::Test {
 protected:
  Comparison() {
    at::manual_seed(3);
    for (size_t i = 0; i < expected.all().size(); ++i) {
      at::Tensor& exact = expected.all()[i].grad;
      exact.copy_(at::randn(exact.sizes(), at::kFloat));
      got.all()[i].grad.copy_(exact);
    }
    check.bound = 1e-3;
  }

  at::Tensor& gradient(const std::string& name) {
    for (model::Parameter& p : got.all()) {
      if (p.name == name) return p.grad;
    }
    throw std::logic_error("no parameter " + name);
  }

  const model::ModelConfig config = [] {
    model::ModelConfig c = model_of(3, 1, 6, false);
    c.hidden_size = 10;
    c.num_layers = 2;
    return c;
  }();
  model::Parameters got{config, {at::kFloat, kCpu}, true};
  model::Parameters expected{config, {at::kDouble, kCpu}, true};
  GradientCheck check;
};

TEST_F(Comparison, EqualGradientsPass) {
  compare_gradients(got, expected, check);
  EXPECT_LT(check.worst_error, 1e-7);
  EXPECT_TRUE(check.passed());
  EXPECT_NO_THROW(require_passed(check));
}

TEST_F(Comparison, OneWrongTensorFailsAndIsNamed) {
  gradient("layers.1.down").mul_(1.0 + 0.5 * check.bound);
  compare_gradients(got, expected, check);
  EXPECT_TRUE(check.passed());
  gradient("layers.1.down").mul_(1.0 + 2 * check.bound);
  compare_gradients(got, expected, check);
  EXPECT_FALSE(check.passed());
  EXPECT_EQ(check.tensor, "layers.1.down");
  try {
    require_passed(check);
    FAIL() << "a failed check must not go on";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("layers.1.down"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

TEST_F(Comparison, AMissingTensorIsARelativeErrorOfOne) {
  gradient("layers.0.qkv_bias").zero_();
  compare_gradients(got, expected, check);
  EXPECT_FALSE(check.passed());
  EXPECT_NEAR(check.worst_error, 1.0, 1e-6);
  EXPECT_EQ(check.tensor, "layers.0.qkv_bias");
}

TEST_F(Comparison, NaNFails) {
  gradient("embedding")[0][0] = std::numeric_limits<float>::quiet_NaN();
  compare_gradients(got, expected, check);
  EXPECT_FALSE(check.passed());
  EXPECT_EQ(check.tensor, "embedding");
}

TEST_F(Comparison, AWrongLossFailsWithRightGradients) {
  compare_gradients(got, expected, check);
  check.loss_error = 2 * check.bound;
  EXPECT_FALSE(check.passed());
}

TEST(GradientCheckOf, TheRunsKindsOfModelAndAttentionPass) {
  struct Case {
    model::ModelConfig model;
    PipelineOptions options;
    at::ScalarType compute, slots;
  };
  PipelineOptions two_level = options_of(96, 5, 15, 7);
  two_level.selection.chunk_pages = 11;
  two_level.selection.sink_pages = 2;
  PipelineOptions previous = options_of(64, 16, 16, 4);
  previous.selection.votes = attention::Votes::previous_tile;
  const Case cases[] = {
      {model_of(28, 4, 128, false), options_of(4096, 64, 64, 64), at::kBFloat16, at::kFloat},
      {model_of(7, 1, 64, false), options_of(4096, 32, 64, -1), at::kBFloat16, at::kFloat},
      {model_of(4, 2, 32, true), options_of(256, 32, 32, 4), at::kFloat, at::kFloat},
      {model_of(4, 2, 32, true), options_of(256, 32, 32, 4), at::kFloat, at::kBFloat16},
      {model_of(3, 1, 6, false), two_level, at::kFloat, at::kFloat},
      {model_of(5, 5, 14, true), previous, at::kBFloat16, at::kFloat},
      {model_of(3, 3, 2, false), options_of(7, 1, 7, 0), at::kFloat, at::kFloat},
      {model_of(3, 1, 6, true), options_of(12, 3, 6, -1), at::kDouble, at::kDouble},
  };
  for (const Case& c : cases) {
    PipelineOptions options = c.options;
    options.gradient_dtype = c.slots;
    const GradientCheck check = check_gradients(c.model, options, {c.compute, kCpu});
    const std::string what = std::string(c10::toString(c.compute)) + ", D=" + std::to_string(c.model.head_dim) +
                             " P=" + std::to_string(options.selection.page_tokens);
    std::printf("%-24s worst %.2e (%s), loss %.2e, bound %.2e\n", what.c_str(), check.worst_error, check.tensor.c_str(),
                check.loss_error, check.bound);
    EXPECT_TRUE(check.passed()) << what;
    EXPECT_GE(check.tokens, 3 * check.chunk) << what;
  }
}

TEST(RoundingBound, FollowsTheCoarserType) {
  const TensorTypes bf16{at::kBFloat16, kCpu}, fp32{at::kFloat, kCpu}, fp64{at::kDouble, kCpu};
  // 46 roundings of 2^-8 with variance 1/3: 3 * sqrt(46 / 3) / 256; the sum's terms are far below.
  EXPECT_NEAR(rounding_bound(bf16, at::kFloat, 2, 800), 3 * std::sqrt(46.0 / 3) / 256, 1e-6);
  EXPECT_LT(rounding_bound(fp32, at::kFloat, 2, 800), 1e-5);
  EXPECT_LT(rounding_bound(fp64, at::kDouble, 2, 800), 1e-13);
  EXPECT_NEAR(rounding_bound(fp32, at::kBFloat16, 2, 800), rounding_bound(bf16, at::kFloat, 2, 800), 1e-6);
}

TEST(ModelFlops, DenseIsTheCausalHalf) {
  for (const int64_t n : {1, 2, 63, 64, 65, 1021}) {
    EXPECT_EQ(attended_keys(options_of(64, 16, 16, -1), n), n * (n + 1) / 2) << n;
  }
}

TEST(ModelFlops, SparseCountsWhatIsAttended) {
  // Chunks of 8 tokens and pages of 4: 0, 2, 4 past pages, of which 3 are taken; the last chunk has 5 tokens.
  const int64_t own = 36 + 36 + 15;
  EXPECT_EQ(attended_keys(options_of(8, 4, 4, 3), 21), own + 8 * 2 * 4 + 5 * 3 * 4);
  EXPECT_EQ(attended_keys(options_of(8, 4, 4, 0), 21), own);
  EXPECT_EQ(attended_keys(options_of(8, 4, 4, 100), 21), 21 * 22 / 2);
}

TEST(ModelFlops, WeightsWithoutTheInputTable) {
  const PipelineOptions none = options_of(1, 1, 1, 0);  // every token attends to itself alone
  const model::ModelConfig untied = model_of(3, 1, 6, false), tied = model_of(3, 1, 6, true);
  const double attention = 12.0 * 3 * 6 * 28 * 5;
  const double table = 61.0 * 1000;
  EXPECT_DOUBLE_EQ(model_flops(untied, none, 5),
                   30.0 * (static_cast<double>(model::num_parameters(untied)) - table) + attention);
  EXPECT_DOUBLE_EQ(model_flops(tied, none, 5), model_flops(untied, none, 5));
}

TEST(Statistics, Median) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
}

}  // namespace
}  // namespace oomb::bench
