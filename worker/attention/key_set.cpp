#include "worker/attention/key_set.h"

#include <optional>
#include <stdexcept>
#include <tuple>

namespace oomb::attention {

namespace {

enum class Implementation : uint8_t { math, flash_cpu, flash_cuda, cudnn };

Implementation implementation_of(const at::Tensor& q) {
  if (q.is_cuda() && q.scalar_type() == at::kBFloat16) {
    // The bits of cuDNN's dQ differ from run to run.
    return at::globalContext().deterministicAlgorithms() ? Implementation::flash_cuda : Implementation::cudnn;
  }
  if (q.is_cpu() && q.scalar_type() == at::kFloat) return Implementation::flash_cpu;
  return Implementation::math;
}

// [Hkv, C, G, D] as batch Hkv, heads G, tokens C: strides only, no copy.
at::Tensor group_as_heads(const at::Tensor& x) { return x.transpose(1, 2); }

PartialOutput cudnn_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
  auto result =
      at::_scaled_dot_product_cudnn_attention(q, k, v, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true,
                                              /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false, scale);
  at::Tensor lse = std::get<1>(result);
  return {std::get<0>(result), lse.dim() == 4 ? lse.squeeze(-1) : lse};
}

PartialGradient cudnn_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               bool causal, double scale) {
  // Without dropout the generator state is not read, but the operator wants tensors for it.
  const at::Tensor seed = at::zeros({}, q.options().dtype(at::kLong)),
                   offset = at::zeros({}, q.options().dtype(at::kLong));
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      rows.d_o, q, k, v, rows.o, rows.lse.unsqueeze(-1), seed, offset, /*attn_bias=*/at::Tensor(),
      /*cum_seq_q=*/at::Tensor(),
      /*cum_seq_k=*/at::Tensor(), q.size(2), k.size(2), /*dropout_p=*/0.0, causal, scale);
  return {dq, dk, dv};
}

// The operator's layout is [batch, rows, heads, D]; ours [batch, heads, rows, D] as strides.
at::Tensor rows_before_heads(const at::Tensor& x) { return x.transpose(1, 2); }

PartialOutput flash_cuda_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                 double scale) {
  auto result = at::_flash_attention_forward(rows_before_heads(q), rows_before_heads(k), rows_before_heads(v),
                                             /*cum_seq_q=*/std::nullopt, /*cum_seq_k=*/std::nullopt, q.size(2),
                                             k.size(2), /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false, scale);
  return {rows_before_heads(std::get<0>(result)), std::get<1>(result)};
}

PartialGradient flash_cuda_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v, bool causal, double scale) {
  // Without dropout the generator state is not read, but the operator wants tensors for it.
  const at::Tensor seed = at::zeros({2}, q.options().dtype(at::kLong)), offset = at::zeros({}, seed.options());
  auto [dq, dk, dv] = at::_flash_attention_backward(
      rows_before_heads(rows.d_o), rows_before_heads(q), rows_before_heads(k), rows_before_heads(v),
      rows_before_heads(rows.o), rows.lse.contiguous(), /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(),
      q.size(2), k.size(2), /*dropout_p=*/0.0, causal, seed, offset, scale);
  return {rows_before_heads(dq), rows_before_heads(dk), rows_before_heads(dv)};
}

PartialOutput flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
  auto [o, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0.0, causal,
                                                                  /*attn_mask=*/std::nullopt, scale);
  return {o, lse};
}

PartialGradient flash_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               bool causal, double scale) {
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      rows.d_o, q, k, v, rows.o, rows.lse, /*dropout_p=*/0.0, causal, /*attn_mask=*/std::nullopt, scale);
  return {dq, dk, dv};
}

PartialOutput library_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                              double scale) {
  switch (implementation_of(q)) {
    case Implementation::cudnn:
      return cudnn_forward(q, k, v, causal, scale);
    case Implementation::flash_cuda:
      return flash_cuda_forward(q, k, v, causal, scale);
    case Implementation::flash_cpu:
      return flash_forward(q, k, v, causal, scale);
    case Implementation::math:
      break;
  }
  throw std::logic_error("attention: no library implementation for these tensors");
}

PartialGradient library_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 bool causal, double scale) {
  switch (implementation_of(q)) {
    case Implementation::cudnn:
      return cudnn_backward(rows, q, k, v, causal, scale);
    case Implementation::flash_cuda:
      return flash_cuda_backward(rows, q, k, v, causal, scale);
    case Implementation::flash_cpu:
      return flash_backward(rows, q, k, v, causal, scale);
    case Implementation::math:
      break;
  }
  throw std::logic_error("attention: no library implementation for these tensors");
}

// A KV head as the keys of its whole group. The GPU's operators do that themselves; the CPU's wants one key head per
// query head.
at::Tensor keys_for_group(const at::Tensor& k, const at::Tensor& q) {
  const at::Tensor heads = group_as_heads(k);
  return q.is_cuda() ? heads : heads.expand({-1, q.size(2), -1, -1});
}

// Its transpose, back in the layout of k [Hkv, C, 1, D].
at::Tensor sum_over_group(const at::Tensor& dk) {
  return (dk.size(1) == 1 ? dk : dk.sum(1, /*keepdim=*/true)).transpose(1, 2).contiguous();
}

// [Hkv, C, G(, D)] -> [1, Hkv, C * G(, D)]
at::Tensor rows_of(const at::Tensor& x) {
  return (x.dim() == 4 ? x.view({x.size(0), -1, x.size(3)}) : x.view({x.size(0), -1})).unsqueeze(0);
}

}  // namespace

bool stores_scores(const at::Tensor& q) { return implementation_of(q) == Implementation::math; }

MergedRows merged_rows(const at::Tensor& d_o, const at::Tensor& o, const at::Tensor& lse) {
  MergedRows rows{d_o, o, lse, {}};
  if (implementation_of(o) == Implementation::math) {
    rows.delta = (d_o.to(lse.scalar_type()) * o.to(lse.scalar_type())).sum(-1);
  }
  return rows;
}

PartialOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  if (implementation_of(q) == Implementation::math) return attend_dense(q, k, v, scale);
  return library_forward(q, k, v, /*causal=*/false, scale);
}

PartialGradient attend_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                double scale) {
  if (implementation_of(q) == Implementation::math) {
    return attend_dense_backward(rows.d_o, q, k, v, rows.lse, rows.delta, scale);
  }
  return library_backward(rows, q, k, v, /*causal=*/false, scale);
}

PartialOutput attend_own_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  if (implementation_of(q) == Implementation::math) {
    PartialOutput out = attend_causal(rows_of(q), rows_of(k), rows_of(v), q.size(2), scale);
    return {out.o.view(q.sizes()), out.lse.view({q.size(0), q.size(1), q.size(2)})};
  }
  PartialOutput out =
      library_forward(group_as_heads(q), keys_for_group(k, q), keys_for_group(v, q), /*causal=*/true, scale);
  return {out.o.transpose(1, 2).contiguous(), out.lse.transpose(1, 2).contiguous()};
}

PartialGradient attend_own_chunk_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, double scale) {
  if (implementation_of(q) == Implementation::math) {
    PartialGradient out = attend_causal_backward(rows_of(rows.d_o), rows_of(q), rows_of(k), rows_of(v),
                                                 rows_of(rows.lse), rows_of(rows.delta), q.size(2), scale);
    return {out.dq.view(q.sizes()), out.dk.view(k.sizes()), out.dv.view(v.sizes())};
  }
  const MergedRows heads{group_as_heads(rows.d_o), group_as_heads(rows.o), rows.lse.transpose(1, 2).contiguous(), {}};
  PartialGradient out =
      library_backward(heads, group_as_heads(q), keys_for_group(k, q), keys_for_group(v, q), /*causal=*/true, scale);
  return {out.dq.transpose(1, 2).contiguous(), sum_over_group(out.dk), sum_over_group(out.dv)};
}

}  // namespace oomb::attention
