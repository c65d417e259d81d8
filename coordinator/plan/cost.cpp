#include "coordinator/plan/cost.h"

#include <algorithm>

#include "worker/sizes/model_sizes.h"

namespace oomb::plan {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

}  // namespace

CostModel::CostModel(const RunConfig& config, const model::ModelConfig& model, const Rates& rates, double slowdown)
    : config_(config), model_(model), rates_(rates), slowdown_(slowdown) {}

LayerCost CostModel::layer(std::int64_t tokens, std::int64_t past_pages) const {
  const AttentionSection& a = config_.attention;
  const double n = real(tokens), h = real(model_.hidden_size), i = real(model_.intermediate_size);
  const double q = real(model_.num_heads * model_.head_dim), kv = real(model_.num_kv_heads * model_.head_dim);
  const double element = real(sizes::element_bytes(config_).compute);
  const double qkv_parameters = h * (q + 2 * kv), finish_parameters = h * q + 3 * h * i;
  const auto linear = [&](double parameters) { return 2 * parameters * n / rates_.gemm; };
  const auto element_wise = [&](double elements) { return elements * n * element / rates_.copy; };

  const bool dense = a.kind == AttentionKind::kDense;
  const double keys = real((dense ? past_pages : std::min(past_pages, a.budget_pages)) * a.page_tokens);
  const double past_flops = 4 * n * keys * q, own_flops = 2 * n * n * q;
  LayerCost cost;
  cost.project = linear(qkv_parameters) + element_wise(4 * h + 4 * (q + kv));
  cost.finish = linear(finish_parameters) + element_wise(4 * h + 3 * i);
  cost.down = linear(h * i);
  cost.own = own_flops / rates_.attention_forward;
  cost.past = past_flops / rates_.attention_forward;
  if (!dense && past_pages > a.budget_pages) cost.select = 2 * 3 * 2 * n * kv * real(past_pages) / rates_.select;
  cost.finish_inputs = linear(finish_parameters) + element_wise(6 * h + 6 * i);
  cost.finish_weights = linear(finish_parameters);
  cost.own_backward = 2.5 * own_flops / rates_.attention_backward;
  cost.past_backward = 2.5 * past_flops / rates_.attention_backward;
  cost.project_backward = 2 * linear(qkv_parameters) + element_wise(6 * h + 4 * (q + kv));
  for (double* part :
       {&cost.project, &cost.own, &cost.select, &cost.past, &cost.finish, &cost.down, &cost.finish_inputs,
        &cost.finish_weights, &cost.own_backward, &cost.past_backward, &cost.project_backward}) {
    *part *= slowdown_;
  }
  return cost;
}

double CostModel::head(std::int64_t tokens) const {
  return 3 * 2 * real(model_.vocab_size * model_.hidden_size) * real(tokens) / rates_.gemm * slowdown_;
}

double CostModel::optimizer(std::int64_t parameters) const {
  // Moments and masters (or weights) are read and written, gradients read, weights written.
  const sizes::ElementBytes e = sizes::element_bytes(config_);
  const sizes::StateBytes state = sizes::state_bytes(model_, config_, 1);
  const double states = real(state.moments + state.masters) / real(num_parameters(model_));
  return real(parameters) * (2 * states + real(e.acc + 2 * e.compute)) / rates_.copy * slowdown_;
}

double CostModel::chunk(std::int64_t tokens, std::int64_t past_pages) const {
  const LayerCost cost = layer(tokens, past_pages);
  return real(model_.num_layers) * (2 * cost.forward() + cost.select + cost.backward()) + head(tokens);
}

double model_flops_per_token(const model::ModelConfig& model, double keys) {
  const std::int64_t counted =
      num_parameters(model) - (model.tie_word_embeddings ? 0 : model.vocab_size * model.hidden_size);
  return 6 * real(counted) + 12 * keys * real(model.num_heads * model.head_dim * model.num_layers);
}

}  // namespace oomb::plan
