// Faults that systems like this one have had in public, as inputs with the right value. Names follow their trackers.
#include <gtest/gtest.h>

#include "tests/worker/oracle.h"
#include "worker/attention/dense_math.h"
#include "worker/loss/head_loss.h"

namespace oomb::test {
namespace {

const TensorTypes kDouble{at::kDouble, at::Device(at::kCPU)};

PipelineOptions dense(int64_t chunk, int64_t page) {
  PipelineOptions o;
  o.chunk_tokens = chunk;
  o.selection.dense = true;
  o.selection.page_tokens = page;
  o.selection.query_tile = page;
  o.gradient_dtype = at::kDouble;
  return o;
}

struct Trained {
  double loss = 0;
  std::vector<at::Tensor> grads;
};

Trained train(const model::ModelConfig& config, const PipelineOptions& options, const std::vector<int64_t>& ids) {
  Rig rig(config, options, kDouble, static_cast<int64_t>(ids.size()), 31);
  Trained out;
  out.loss = rig.pipeline.train(ids, shifted_labels(ids), 1.0).loss_sum;
  for (const auto& p : rig.parameters.all()) out.grads.push_back(p.grad.clone());
  EXPECT_EQ(rig.memory.slots_in_use(), 0);
  return out;
}

void expect_equal(const Trained& a, const Trained& b, const std::string& what) {
  EXPECT_NEAR(a.loss, b.loss, 1e-11 * b.loss) << what;
  for (size_t i = 0; i < a.grads.size(); ++i) {
    EXPECT_LE((a.grads[i] - b.grads[i]).norm().item<double>(), 1e-9 * b.grads[i].norm().item<double>())
        << what << ", " << i;
  }
}

// TransformerEngine 1929: seven keys treated as six. Uniform attention over 1,1,1,1,2,2,2 is 10/7; without the last,
// 4/3.
TEST(Cases, LengthSevenKeepsItsLastKey) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor values = at::tensor({1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0}, options).view({1, 1, 7, 1});
  const attention::PartialOutput out =
      attention::attend_dense(at::ones({1, 1, 1, 1}, options), at::zeros({1, 1, 7, 1}, options), values, 1.0);
  EXPECT_NEAR(out.o.item<double>(), 10.0 / 7.0, 1e-15);
}

// EasyContext 47, ring-flash-attention 39 and 51: lengths that no chunk or page divides.
TEST(Cases, LengthsThatNothingDivides) {
  const model::ModelConfig config = small_config(2, 1, false, 1);
  for (const int64_t n : {698, 2999}) {
    const auto ids = random_ids(n, config.vocab_size, 7);
    const Trained whole = train(config, dense(4096, 128), ids);
    for (const int64_t chunk : {128, 512, 1024}) {
      expect_equal(train(config, dense(chunk, 128), ids), whole,
                   "N=" + std::to_string(n) + " C=" + std::to_string(chunk));
    }
  }
}

TEST(Cases, OneTokenBesidePageAndChunkBorders) {
  const model::ModelConfig config = small_config(2, 1, false, 1);
  for (const int64_t n : {31, 32, 33, 127, 128, 129, 255, 257, 383, 385}) {
    const auto ids = random_ids(n, config.vocab_size, 7);
    expect_equal(train(config, dense(128, 32), ids), train(config, dense(512, 32), ids), "N=" + std::to_string(n));
  }
}

// ring-flash-attention 39: 32,769 tokens. Selected pages; what is checked is that nothing is left over or out of range.
TEST(Cases, OneTokenMoreThan32768) {
  const model::ModelConfig config = small_config(2, 1, false, 1);
  PipelineOptions options = dense(4096, 128);
  options.selection.dense = false;
  options.selection.budget_pages = 4;
  const auto ids = random_ids(32769, config.vocab_size, 7);
  const Trained a = train(config, options, ids);
  options.activations = {KeptActivations::no_norms, 2, 9};
  const Trained b = train(config, options, ids);
  EXPECT_EQ(a.loss, b.loss);
  for (size_t i = 0; i < a.grads.size(); ++i) {
    EXPECT_TRUE(at::isfinite(a.grads[i]).all().item<bool>());
    EXPECT_TRUE(at::equal(a.grads[i], b.grads[i]));
  }
}

// vllm-omni 5716: with 28 query and 4 KV heads, head h reads KV head h / 7.
TEST(Cases, QueryHeadReadsItsGroupsKeys) {
  model::ModelConfig config = small_config(28, 4, false, 1);
  config.head_dim = 2;
  const auto ids = random_ids(45, config.vocab_size, 7);
  PipelineOptions options = dense(16, 4);
  Rig rig(config, options, kDouble, 45, 31);
  const double loss = rig.pipeline.train(ids, shifted_labels(ids), 1.0).loss_sum;
  const OracleResult oracle = full_sequence_autograd(rig.parameters, options, ids, shifted_labels(ids), 1.0);
  EXPECT_NEAR(loss, oracle.loss_sum, 1e-12 * oracle.loss_sum);
  for (const auto& p : rig.parameters.all()) {
    EXPECT_LE((p.grad - oracle.grads.at(p.name)).norm().item<double>(),
              1e-9 * oracle.grads.at(p.name).norm().item<double>())
        << p.name;
  }
}

// Liger 830: the head's gradient summed over tiles in bf16 loses bits. 64 tiles against one.
TEST(Cases, HeadGradientOverManyTiles) {
  const auto gradient = [](int64_t row_tile) {
    model::ModelConfig config = small_config();
    config.hidden_size = 32;
    config.vocab_size = 97;
    model::Parameters parameters(config, TensorTypes{at::kBFloat16, at::Device(at::kCPU)}, /*training=*/true);
    randomise(parameters, 3);
    at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCPU));
    generator.set_current_seed(11);
    const at::Tensor hidden = at::randn({512, 32}, at::TensorOptions().dtype(at::kBFloat16));
    const auto labels = random_ids(512, 97, 5);
    head_loss(hidden, to_device(labels, at::Device(at::kCPU)), parameters.head(), row_tile, 1.0 / 512,
              /*gradients=*/true);
    return parameters.head().grad.to(at::kDouble);
  };
  const at::Tensor one = gradient(512), many = gradient(8);
  EXPECT_LE((many - one).norm().item<double>() / one.norm().item<double>(), 1e-3);
}

// FlashAttention 334: a row that sees no key has output 0, log-sum-exp -inf, and takes part in nothing. Here: budget 0.
TEST(Cases, NoPastPagesAtAll) {
  const model::ModelConfig config = small_config(2, 1, false, 1);
  PipelineOptions options = dense(16, 4);
  options.selection.dense = false;
  options.selection.budget_pages = 0;
  const auto ids = random_ids(61, config.vocab_size, 7);
  Rig rig(config, options, kDouble, 61, 31);
  const double loss = rig.pipeline.train(ids, shifted_labels(ids), 1.0).loss_sum;
  const OracleResult oracle = full_sequence_autograd(rig.parameters, options, ids, shifted_labels(ids), 1.0);
  EXPECT_NEAR(loss, oracle.loss_sum, 1e-12 * oracle.loss_sum);
}

}  // namespace
}  // namespace oomb::test
