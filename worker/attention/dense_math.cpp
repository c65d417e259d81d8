#include "worker/attention/dense_math.h"

#include <algorithm>
#include <limits>

namespace oomb::attention {

namespace {

at::ScalarType acc_of(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
at::Tensor to_acc(const at::Tensor& x) { return x.to(acc_of(x)); }

// Adds -inf where key j of the last `tokens` keys lies after query token i. scores [.., tokens * G, keys].
void mask_future(at::Tensor& scores, int64_t tokens, int64_t group) {
  at::Tensor later = at::ones({tokens, tokens}, scores.options().dtype(at::kBool)).triu_(1);
  later = later.unsqueeze(1).expand({tokens, group, tokens}).reshape({tokens * group, tokens});
  scores.narrow(-1, scores.size(-1) - tokens, tokens).masked_fill_(later, -std::numeric_limits<double>::infinity());
}

// Inputs in acc. scores is consumed.
PartialOutput softmax_times_values(at::Tensor scores, const at::Tensor& v) {
  PartialOutput out;
  out.lse = at::logsumexp(scores, {-1});
  out.o = at::matmul(scores.sub_(out.lse.unsqueeze(-1)).exp_(), v);
  return out;
}

PartialGradient gradients(at::Tensor scores, const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta, double scale) {
  PartialGradient out;
  at::Tensor p = scores.sub_(lse.unsqueeze(-1)).exp_();
  out.dv = at::matmul(p.transpose(-2, -1), d_o);
  at::Tensor ds = at::matmul(d_o, v.transpose(-2, -1)).sub_(delta.unsqueeze(-1)).mul_(p).mul_(scale);
  out.dq = at::matmul(ds, k);
  out.dk = at::matmul(ds.transpose(-2, -1), q);
  return out;
}

}  // namespace

PartialOutput attend_dense(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  return softmax_times_values(at::matmul(to_acc(q), to_acc(k).transpose(-2, -1)).mul_(scale), to_acc(v));
}

PartialGradient attend_dense_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                                      double scale) {
  const at::Tensor qa = to_acc(q), ka = to_acc(k), va = to_acc(v);
  return gradients(at::matmul(qa, ka.transpose(-2, -1)).mul_(scale), to_acc(d_o), qa, ka, va, lse, delta, scale);
}

PartialOutput attend_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t group, double scale,
                            int64_t block_tokens) {
  const at::Tensor qa = to_acc(q), ka = to_acc(k), va = to_acc(v);
  const int64_t num_tokens = k.size(2);
  PartialOutput out;
  out.o = at::empty_like(qa, at::MemoryFormat::Contiguous);
  out.lse = at::empty({q.size(0), q.size(1), q.size(2)}, qa.options());
  for (int64_t begin = 0; begin < num_tokens; begin += block_tokens) {
    const int64_t tokens = std::min(block_tokens, num_tokens - begin), keys = begin + tokens;
    at::Tensor scores =
        at::matmul(qa.narrow(2, begin * group, tokens * group), ka.narrow(2, 0, keys).transpose(-2, -1)).mul_(scale);
    mask_future(scores, tokens, group);
    PartialOutput block = softmax_times_values(scores, va.narrow(2, 0, keys));
    out.o.narrow(2, begin * group, tokens * group).copy_(block.o);
    out.lse.narrow(2, begin * group, tokens * group).copy_(block.lse);
  }
  return out;
}

PartialGradient attend_causal_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                                       int64_t group, double scale, int64_t block_tokens) {
  const at::Tensor da = to_acc(d_o), qa = to_acc(q), ka = to_acc(k), va = to_acc(v);
  const int64_t num_tokens = k.size(2);
  PartialGradient out;
  out.dq = at::empty_like(qa, at::MemoryFormat::Contiguous);
  out.dk = at::zeros_like(ka, at::MemoryFormat::Contiguous);
  out.dv = at::zeros_like(va, at::MemoryFormat::Contiguous);
  for (int64_t begin = 0; begin < num_tokens; begin += block_tokens) {
    const int64_t tokens = std::min(block_tokens, num_tokens - begin), keys = begin + tokens;
    const auto rows = [&](const at::Tensor& x) { return x.narrow(2, begin * group, tokens * group); };
    const at::Tensor kb = ka.narrow(2, 0, keys);
    at::Tensor scores = at::matmul(rows(qa), kb.transpose(-2, -1)).mul_(scale);
    mask_future(scores, tokens, group);
    PartialGradient block =
        gradients(scores, rows(da), rows(qa), kb, va.narrow(2, 0, keys), rows(lse), rows(delta), scale);
    rows(out.dq).copy_(block.dq);
    out.dk.narrow(2, 0, keys).add_(block.dk);
    out.dv.narrow(2, 0, keys).add_(block.dv);
  }
  return out;
}

}  // namespace oomb::attention
