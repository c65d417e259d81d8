// The pipeline on a GPU against the double-precision oracle on the CPU. Skipped, and said so, where there is no GPU.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/worker/oracle.h"
#include "worker/train/device_memory.h"

namespace oomb::test {
namespace {

const at::Device kGpu(at::kCUDA, 0);

class GpuPipeline : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU on this machine";
    initialise_device(kGpu);
  }
};

PipelineOptions options_of(int64_t chunk, int64_t page, int64_t tile, int64_t budget, at::ScalarType gradient_dtype) {
  PipelineOptions o;
  o.chunk_tokens = chunk;
  o.selection.dense = budget < 0;
  o.selection.page_tokens = page;
  o.selection.query_tile = tile;
  o.selection.budget_pages = std::max<int64_t>(budget, 0);
  o.gradient_dtype = gradient_dtype;
  o.loss_row_tile = 37;
  return o;
}

struct Errors {
  double loss = 0, worst = 0, all = 0;
};

// Relative errors against the oracle that masks what the pipeline's rule selects in double precision.
Errors errors_of(const model::ModelConfig& config, const PipelineOptions& options, at::ScalarType compute, int64_t n,
                 int64_t fast_bytes) {
  const auto ids = random_ids(n, config.vocab_size, 5);
  const auto labels = shifted_labels(ids, n > 2);
  Rig rig(config, options, TensorTypes{compute, kGpu}, n, 17, fast_bytes);
  const SequenceLoss loss = rig.pipeline.train(ids, labels, 0.25);
  const OracleResult oracle = full_sequence_autograd(rig.parameters, options, ids, labels, 0.25);
  Errors e;
  e.loss = std::abs(loss.loss_sum - oracle.loss_sum) / oracle.loss_sum;
  double error_sum = 0, norm_sum = 0;
  for (const model::Parameter& p : rig.parameters.all()) {
    const at::Tensor& expected = oracle.grads.at(p.name);
    const double error = (p.grad.cpu().to(at::kDouble) - expected).norm().item<double>(),
                 norm = expected.norm().item<double>();
    e.worst = std::max(e.worst, error / norm);
    error_sum += error * error;
    norm_sum += norm * norm;
  }
  e.all = std::sqrt(error_sum / norm_sum);
  std::printf("N=%ld C=%ld P=%ld B=%ld: loss %.2e, worst tensor %.2e, all gradients %.2e\n", n, options.chunk_tokens,
              options.selection.page_tokens, options.selection.budget_pages, e.loss, e.worst, e.all);
  EXPECT_EQ(rig.memory.slots_in_use(), 0);
  return e;
}

TEST_F(GpuPipeline, DoublePrecisionIsExact) {
  for (const int64_t n : {2, 15, 16, 17, 83, 97}) {
    for (const int64_t budget : {-1, 2, 0}) {
      for (const int64_t fast : {int64_t{0}, int64_t{1} << 24}) {
        const Errors e = errors_of(small_config(), options_of(16, 4, 8, budget, at::kDouble), at::kDouble, n, fast);
        EXPECT_LE(e.loss, 1e-12);
        EXPECT_LE(e.worst, 1e-9);
      }
    }
  }
}

TEST_F(GpuPipeline, SinglePrecision) {
  for (const int64_t budget : {-1, 2}) {
    const Errors e = errors_of(small_config(), options_of(16, 4, 8, budget, at::kFloat), at::kFloat, 97, 1 << 24);
    EXPECT_LE(e.loss, 1e-5);
    EXPECT_LE(e.all, 2e-5);
  }
}

model::ModelConfig wide_config() {
  model::ModelConfig c = small_config(14, 2);
  c.hidden_size = 896;
  c.intermediate_size = 1216;
  c.head_dim = 128;
  c.vocab_size = 509;
  c.rope_theta = 10000.0;
  return c;
}

// bf16 weights and activations through cuDNN attention: 3 significant digits survive; a missing term would cost far
// more.
TEST_F(GpuPipeline, Bfloat16WithCudnnAttention) {
  for (const int64_t n : {1024, 1500}) {
    const Errors e =
        errors_of(wide_config(), options_of(512, 128, 128, -1, at::kFloat), at::kBFloat16, n, int64_t{1} << 30);
    EXPECT_LE(e.loss, 1e-2);
    EXPECT_LE(e.all, 3e-2);
  }
}

std::vector<at::Tensor> gradients(const PipelineOptions& options, int64_t n, int64_t fast_bytes) {
  const auto ids = random_ids(n, 509, 5);
  Rig rig(wide_config(), options, TensorTypes{at::kBFloat16, kGpu}, n, 17, fast_bytes);
  rig.pipeline.train(ids, shifted_labels(ids), 0.25);
  std::vector<at::Tensor> out;
  for (const auto& p : rig.parameters.all()) out.push_back(p.grad.cpu());
  return out;
}

// Deterministic algorithms for as long as it lives.
class Deterministic {
 public:
  Deterministic() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false); }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false); }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;
};

void expect_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", tensor " << i;
}

TEST_F(GpuPipeline, DeterministicModeIsRight) {
  const Deterministic mode;
  for (const int64_t n : {1024, 1500}) {
    const Errors e =
        errors_of(wide_config(), options_of(512, 128, 128, -1, at::kFloat), at::kBFloat16, n, int64_t{1} << 30);
    EXPECT_LE(e.loss, 1e-2);
    EXPECT_LE(e.all, 3e-2);
  }
}

TEST_F(GpuPipeline, DeterministicModeRepeatsEveryBit) {
  const Deterministic mode;
  for (const int64_t budget : {-1, 8}) {
    PipelineOptions options = options_of(2048, 128, 128, budget, at::kFloat);
    const auto first = gradients(options, 8192 + 77, int64_t{1} << 30);
    expect_same_bits(gradients(options, 8192 + 77, int64_t{1} << 30), first, "again");
    expect_same_bits(gradients(options, 8192 + 77, 0), first, "host tier");
    for (const KeptActivations level : kAllLevels) {
      options.activations = {level, 1, 3};
      expect_same_bits(gradients(options, 8192 + 77, int64_t{1} << 30), first, name_of(level));
    }
    options.activations = {KeptActivations::all, 0, 1, 4};
    expect_same_bits(gradients(options, 8192 + 77, int64_t{1} << 30), first, "activations in host memory");
  }
}

TEST_F(GpuPipeline, TiersAgree) {
  // In fp32 (no library attention) every bit; the host tier is read over the bus by the same kernels.
  const auto options = options_of(16, 4, 8, 2, at::kFloat);
  const auto run = [&](int64_t fast_bytes) {
    const auto ids = random_ids(97, 13, 5);
    Rig rig(small_config(), options, TensorTypes{at::kFloat, kGpu}, 97, 17, fast_bytes);
    rig.pipeline.train(ids, shifted_labels(ids), 0.25);
    std::vector<at::Tensor> out;
    for (const auto& p : rig.parameters.all()) out.push_back(p.grad.cpu());
    return out;
  };
  const auto fast = run(1 << 24), host = run(0);
  for (size_t i = 0; i < fast.size(); ++i) EXPECT_TRUE(at::equal(fast[i], host[i])) << i;
}

TEST_F(GpuPipeline, Bfloat16SelectionRunsAtRealSizes) {
  const auto options = options_of(2048, 128, 128, 8, at::kFloat);
  const auto a = gradients(options, 8192 + 77, int64_t{1} << 30);
  for (const at::Tensor& g : a) EXPECT_TRUE(at::isfinite(g).all().item<bool>());
}

}  // namespace
}  // namespace oomb::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  oomb::end_process(RUN_ALL_TESTS());
}
