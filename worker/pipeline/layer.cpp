#include "worker/pipeline/layer.h"

namespace oomb {

void Layer::project(const at::Tensor& x, const at::Tensor& delta, const RopeTables& rope, LayerActivations& a) const {
  NormOutput norm = rms_norm(x, delta, parameters_.input_norm->weight, config_.rms_norm_eps);
  a.x1 = norm.sum;
  a.norm1 = norm.y;
  a.inv_rms1 = norm.inv_rms;
  project_heads(rope, a);
}

void Layer::project_heads(const RopeTables& rope, LayerActivations& a) const {
  const at::Tensor rows = linear_rows(a.norm1, parameters_.qkv->weight, parameters_.qkv_bias->weight);
  const int64_t group = config_.num_heads / config_.num_kv_heads, dim = config_.head_dim, kv = config_.num_kv_heads;
  const int64_t q_columns = config_.num_heads * dim, kv_columns = kv * dim;
  a.qkv.q = heads_from_rows(rows, 0, kv, group, dim, &rope);
  a.qkv.k = heads_from_rows(rows, q_columns, kv, 1, dim, &rope);
  a.qkv.v = heads_from_rows(rows, q_columns + kv_columns, kv, 1, dim, nullptr);
}

at::Tensor Layer::finish(LayerActivations& a) const {
  restore_finish(a);
  return linear_rows(swiglu(a.gate_up), parameters_.down->weight);
}

void Layer::restore_projection(const RopeTables& rope, LayerActivations& a) const {
  if (!a.norm1.defined()) a.norm1 = rms_norm(a.x1, {}, parameters_.input_norm->weight, config_.rms_norm_eps).y;
  if (!a.qkv.q.defined()) project_heads(rope, a);
}

void Layer::restore_finish(LayerActivations& a) const {
  if (!a.x2.defined()) {
    const at::Tensor projected = linear_rows(a.attention.o, parameters_.output->weight);
    const NormOutput norm = rms_norm(a.x1, projected, parameters_.post_norm->weight, config_.rms_norm_eps);
    a.x2 = norm.sum;
    a.norm2 = norm.y;
    a.inv_rms2 = norm.inv_rms;
  }
  if (!a.norm2.defined()) a.norm2 = rms_norm(a.x2, {}, parameters_.post_norm->weight, config_.rms_norm_eps).y;
  if (!a.gate_up.defined()) a.gate_up = linear_rows(a.norm2, parameters_.gate_up->weight);
}

Layer::FinishGradient Layer::finish_backward(const at::Tensor& d_out, const LayerActivations& a) const {
  const at::Tensor d_swiglu = at::mm(d_out, parameters_.down->weight);
  const auto [d_gate_up, activated] = swiglu_backward(a.gate_up, d_swiglu);
  accumulate_weight_gradient(d_out, activated, parameters_.down->grad);
  accumulate_weight_gradient(d_gate_up, a.norm2, parameters_.gate_up->grad);
  const at::Tensor d_norm2 = at::mm(d_gate_up, parameters_.gate_up->weight);
  FinishGradient out;
  out.d_x2 =
      rms_norm_backward(d_norm2, a.x2, parameters_.post_norm->weight, a.inv_rms2, d_out, parameters_.post_norm->grad);
  accumulate_weight_gradient(out.d_x2, a.attention.o, parameters_.output->grad);
  out.d_attention = at::mm(out.d_x2, parameters_.output->weight);
  return out;
}

at::Tensor Layer::project_backward(const attention::AttentionGradient& gradient, const at::Tensor& d_x2,
                                   const RopeTables& rope, const LayerActivations& a) const {
  const int64_t dim = config_.head_dim, q_columns = config_.num_heads * dim, kv_columns = config_.num_kv_heads * dim;
  at::Tensor d_rows = at::empty({d_x2.size(0), q_columns + 2 * kv_columns}, d_x2.options());
  heads_to_rows(gradient.dq, &rope, d_rows, 0);
  heads_to_rows(gradient.dk, &rope, d_rows, q_columns);
  heads_to_rows(gradient.dv, nullptr, d_rows, q_columns + kv_columns);
  accumulate_bias_gradient(d_rows, parameters_.qkv_bias->grad);
  accumulate_weight_gradient(d_rows, a.norm1, parameters_.qkv->grad);
  const at::Tensor d_norm1 = at::mm(d_rows, parameters_.qkv->weight);
  return rms_norm_backward(d_norm1, a.x1, parameters_.input_norm->weight, a.inv_rms1, d_x2,
                           parameters_.input_norm->grad);
}

}  // namespace oomb
