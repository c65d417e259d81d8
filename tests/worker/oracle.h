// The oracle of the pipeline: full-sequence training of the same decoder with LibTorch's autograd and one N x N mask.
// Shares no code with the pipeline but the parameter container; selection is done by the plain rule, page by page.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "worker/pipeline/sequence_pipeline.h"

namespace oomb::test {

/// [layer][chunk][tile] -> ascending pages. Empty for chunks that see all their past.
using OracleSelections = std::vector<std::vector<std::vector<std::vector<int64_t>>>>;

struct OracleResult {
  double loss_sum = 0;
  at::Tensor logits;                        ///< [N, V]
  std::map<std::string, at::Tensor> grads;  ///< by parameter name, of the sum of losses times grad_scale
  OracleSelections selections;
};

OracleResult full_sequence_autograd(const model::Parameters& parameters, const PipelineOptions& options,
                                    const std::vector<int64_t>& ids, const std::vector<int64_t>& labels,
                                    double grad_scale);

/// Random parameters with non-trivial norms and biases (so that no term can hide), reproducible from `seed`.
void randomise(model::Parameters& parameters, uint64_t seed, double key_bias_norm = 0);

std::vector<int64_t> random_ids(int64_t count, int64_t vocab, uint64_t seed);
/// Shifted labels; every seventh is ignored when `with_holes`.
std::vector<int64_t> shifted_labels(const std::vector<int64_t>& ids, bool with_holes = false);

model::ModelConfig small_config(int64_t num_heads = 4, int64_t num_kv_heads = 2, bool tied = false, int64_t layers = 2);

/// A pipeline with its own page memory.
struct Rig {
  Rig(const model::ModelConfig& config, const PipelineOptions& options, const TensorTypes& types, int64_t num_tokens,
      uint64_t seed, int64_t fast_bytes = 0, double key_bias_norm = 0);
  model::Parameters parameters;
  pages::PageMemory memory;
  SequencePipeline pipeline;
};

}  // namespace oomb::test
