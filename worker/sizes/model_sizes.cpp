#include "worker/sizes/model_sizes.h"

#include <algorithm>
#include <stdexcept>

namespace oomb::sizes {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;
constexpr std::int64_t kMomentBlock = 256;  // elements that share a scale

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

ElementBytes element_bytes(const RunConfig& config) {
  ElementBytes bytes;
  switch (config.train.compute_dtype) {
    case ComputeDtype::kFp64:
      bytes.compute = bytes.acc = 8;
      break;
    case ComputeDtype::kFp32:
      bytes.compute = bytes.acc = 4;
      break;
    case ComputeDtype::kBf16:
      bytes.compute = 2;
      bytes.acc = 4;
      break;
  }
  bytes.page = config.pages.dtype == PageDtype::kFp8 ? 1 : bytes.compute;
  switch (config.pages.grad_dtype) {
    case PageGradDtype::kAuto:
      bytes.page_gradient = bytes.acc;
      break;
    case PageGradDtype::kFp32:
      bytes.page_gradient = 4;
      break;
    case PageGradDtype::kBf16:
      bytes.page_gradient = 2;
      break;
  }
  return bytes;
}

StateBytes state_bytes(const model::ModelConfig& model, const RunConfig& config, std::int64_t shards) {
  const ElementBytes e = element_bytes(config);
  const std::int64_t all = num_parameters(model), shard = ceil_div(all, shards);
  StateBytes bytes;
  bytes.weights = all * e.compute;
  bytes.gradients = all * e.acc;
  const bool has_masters = e.compute != e.acc && config.train.master_weights != MasterWeights::kStochasticRounding;
  bytes.masters = has_masters ? shard * e.acc : 0;
  bytes.moments = config.train.optimizer_state == OptimizerState::kInt8
                      ? 2 * (shard + ceil_div(shard, kMomentBlock) * 4)
                      : 2 * shard * e.acc;
  return bytes;
}

std::int64_t elements_per_token(const model::ModelConfig& m, Activations level) {
  const std::int64_t q = m.num_heads * m.head_dim, kv = m.num_kv_heads * m.head_dim;
  switch (level) {
    case Activations::kAll:
      return 4 * m.hidden_size + 2 * (q + kv) + 2 * m.intermediate_size;
    case Activations::kNoNorms:
      return 2 * m.hidden_size + 2 * (q + kv) + 2 * m.intermediate_size;
    case Activations::kAttention:
      return m.hidden_size + q;
    case Activations::kInput:
      return m.hidden_size;
    case Activations::kAuto:
      break;
  }
  throw std::logic_error("activation level auto has no size");
}

std::int64_t activation_bytes(const model::ModelConfig& model, const RunConfig& config, Activations level) {
  const std::int64_t per_token = model.num_layers * elements_per_token(model, level) + model.hidden_size;
  return config.sequence.chunk * per_token * element_bytes(config).compute;
}

std::int64_t host_activation_bytes(const model::ModelConfig& model, const RunConfig& config) {
  const ElementBytes e = element_bytes(config);
  const auto part = [&](std::int64_t per_token) { return ceil_div(config.sequence.chunk * per_token, 4096) * 4096; };
  const std::int64_t stream = part(model.hidden_size * e.compute);
  const std::int64_t layer =
      stream + part(model.num_heads * model.head_dim * e.compute) + part(model.num_heads * e.acc);
  return model.num_layers * layer + stream;
}

WorkingBytes working_bytes(const model::ModelConfig& model, const RunConfig& config, bool gpu) {
  const AttentionSection& a = config.attention;
  WorkingBytes bytes;
  bytes.layer = 2 * activation_bytes(model, config, Activations::kAll) / model.num_layers;
  bytes.logits = 3 * std::min(config.loss.row_tile, config.sequence.chunk) * model.vocab_size * 4;
  const std::int64_t past = config.sequence.length / a.page_tokens;
  const std::int64_t tiles = a.kind == AttentionKind::kDense ? 1 : ceil_div(config.sequence.chunk, query_tile(a));
  const std::int64_t pages = a.kind == AttentionKind::kDense ? past : std::min(past, a.budget_pages);
  const std::int64_t slot = 2 * model.num_kv_heads * a.page_tokens * model.head_dim * element_bytes(config).compute;
  bytes.gathered = 2 * std::min(gpu ? 2 * kGiB : 16 * (kGiB >> 10), tiles * pages * slot);
  bytes.slack = gpu ? 4 * kGiB : kGiB / 4;
  return bytes;
}

PageBytes page_bytes(const model::ModelConfig& model, const RunConfig& config) {
  const ElementBytes e = element_bytes(config);
  const std::int64_t row = model.num_kv_heads * model.head_dim;
  const std::int64_t slot = 2 * row * config.attention.page_tokens;
  const std::int64_t scales = config.pages.dtype == PageDtype::kFp8 ? 2 * model.num_kv_heads * 4 : 0;
  return {slot * e.page + scales, slot * e.page_gradient, row * e.compute};
}

std::int64_t selection_bytes(const RunConfig& config) {
  const AttentionSection& a = config.attention;
  if (a.kind == AttentionKind::kDense) return 0;
  return ceil_div(config.sequence.chunk, query_tile(a)) * a.budget_pages * 4;
}

std::int64_t query_tile(const AttentionSection& attention) {
  return attention.query_tile == 0 ? attention.page_tokens : attention.query_tile;
}

}  // namespace oomb::sizes
