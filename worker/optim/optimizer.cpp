#include "worker/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "configs/error.h"
#include "kernels/adamw.h"
#include "kernels/moment_code.h"

namespace oomb {

double learning_rate_at(const OptimizerOptions& o, int64_t step) {
  if (step <= o.warmup_steps) return o.learning_rate * static_cast<double>(step) / static_cast<double>(o.warmup_steps);
  const int64_t length = std::max<int64_t>(o.total_steps - o.warmup_steps, 1);
  const double progress = std::min(static_cast<double>(step - o.warmup_steps) / static_cast<double>(length), 1.0);
  const double low = o.learning_rate * o.min_learning_rate_ratio;
  return low + (o.learning_rate - low) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

namespace {

at::Tensor new_sum(const model::Parameters& parameters) {
  return at::zeros({1}, parameters.types().acc_options().dtype(at::kDouble));
}

void add_squares(const at::Tensor& values, at::Tensor& sum) {
  const auto queue = queue_of(values);
  const Workspace workspace(kernels::sum_of_squares_workspace_bytes(queue, values.numel()), values.device());
  kernels::SumOfSquares op;
  op.num_elements = values.numel();
  op.dtype = dtype_of(values);
  op.values = values.data_ptr();
  op.out = sum.data_ptr<double>();
  op.workspace = workspace.data();
  check(kernels::sum_of_squares(queue, op), "sum_of_squares");
}

ElementRange range_of(const model::Parameter& p, const ParameterShards* shards) {
  return shards != nullptr ? shards->range_of(p) : ElementRange{0, p.weight.numel()};
}

// Where element `begin` of a tensor is.
void* address(const at::Tensor& tensor, int64_t begin) {
  return static_cast<char*>(tensor.data_ptr()) + begin * tensor.element_size();
}

}  // namespace

double global_gradient_norm(const model::Parameters& parameters, const ParameterShards* shards) {
  at::Tensor sum = new_sum(parameters);
  for (const model::Parameter& p : parameters.all()) {
    const ElementRange range = range_of(p, shards);
    if (range.count > 0) add_squares(p.grad.view({-1}).narrow(0, range.begin, range.count), sum);
  }
  const double own = sum.item<double>();
  return std::sqrt(shards != nullptr ? shards->sum(own) : own);
}

std::string first_not_finite(const model::Parameters& parameters) {
  // A sum of squares needs no temporary as large as the parameter.
  for (const model::Parameter& p : parameters.all()) {
    at::Tensor sum = new_sum(parameters);
    // A block of coded moments that are not all finite has a scale that is not.
    const bool coded = p.m_scale.defined();
    for (const at::Tensor& values :
         {p.master.defined() ? p.master : p.weight, coded ? p.m_scale : p.m, coded ? p.v_scale : p.v}) {
      add_squares(values, sum);
    }
    if (!std::isfinite(sum.item<double>())) return p.name;
  }
  return "";
}

OptimizerReport optimizer_step(model::Parameters& parameters, const OptimizerOptions& options, int64_t step,
                               const ParameterShards* shards) {
  OptimizerReport report;
  if (shards != nullptr) shards->reduce_gradients(parameters);
  report.gradient_norm = global_gradient_norm(parameters, shards);
  report.learning_rate = learning_rate_at(options, step);
  if (!std::isfinite(report.gradient_norm)) {
    throw InputError("step " + std::to_string(step) +
                     ": the gradient norm is not finite; parameters are as after step " + std::to_string(step - 1) +
                     "; a lower train.learning_rate or a smaller train.clip_norm may help");
  }
  const bool clip = options.clip_norm > 0 && report.gradient_norm > options.clip_norm;
  for (model::Parameter& p : parameters.all()) {
    const ElementRange range = range_of(p, shards);
    if (range.count == 0) continue;
    kernels::AdamW op;
    op.num_elements = range.count;
    op.first_element = range.begin;
    op.acc = dtype_of(p.grad);
    op.lr = report.learning_rate;
    op.beta1 = options.beta1;
    op.beta2 = options.beta2;
    op.eps = options.epsilon;
    op.weight_decay = p.decayed ? options.weight_decay : 0.0;
    op.grad_scale = clip ? options.clip_norm / report.gradient_norm : 1.0;
    op.step = step;
    op.master = p.master.defined() ? address(p.master, range.begin) : nullptr;
    op.grad = address(p.grad, range.begin);
    op.m = address(p.m, range.begin);
    op.v = address(p.v, range.begin);
    if (!p.master.is_same(p.weight)) {
      op.weight = address(p.weight, range.begin);
      op.weight_dtype = dtype_of(p.weight);
    }
    if (p.m_scale.defined()) {
      op.moments = kernels::Moments::int8;
      op.m_scale = p.m_scale.data_ptr<float>() + range.begin / kernels::kMomentBlock;
      op.v_scale = p.v_scale.data_ptr<float>() + range.begin / kernels::kMomentBlock;
    }
    // Another name than that of the initial weights, which are drawn from the same seed.
    op.random_key = model::stream_seed(options.rounding_seed, "rounding of " + p.name);
    check(kernels::adamw_step(queue_of(p.weight), op), "adamw_step");
  }
  if (shards != nullptr) shards->gather_weights(parameters);
  return report;
}

}  // namespace oomb
