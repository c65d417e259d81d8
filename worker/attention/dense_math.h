// Attention of query rows over one contiguous key set, forward and backward, through LibTorch's matrix products.
//
// The key sets of a chunk (past pages, own chunk) are computed apart and merged. In the backward pass every key set
// uses the merged log-sum-exp and delta = rowsum(dO * O) of the merged output; then the sets' gradients are independent
// and exact:
//   P = exp(q k^T scale - lse),  dV = P^T dO,  dS = P * (dO V^T - delta) * scale,  dQ = dS K,  dK = dS^T Q.
// Dao et al., "FlashAttention" (arXiv 2205.14135), appendix B.
//
// Shapes: q, o, d_o, dq [A, Hkv, R, D]; k, v, dk, dv [A, Hkv, K, D]; lse, delta acc [A, Hkv, R]. A is a batch (tiles);
// R rows hold the G heads of a group for each token, token-major, so dK and dV sum over the group by themselves.
#pragma once

#include <ATen/ATen.h>

namespace oomb::attention {

struct PartialOutput {
  at::Tensor o;    ///< acc [A, Hkv, R, D], normalised within this key set
  at::Tensor lse;  ///< acc [A, Hkv, R]; -inf where a row sees no key
};

struct PartialGradient {
  at::Tensor dq, dk, dv;  ///< acc
};

/// Every row sees every key.
PartialOutput attend_dense(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);
PartialGradient attend_dense_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                                      double scale);

/// A = 1, R = C * G rows in token order, K = C: row (c, g) sees keys 0..c. Works in blocks of `block_tokens` queries,
/// so the scores in memory are bounded by block_tokens * G * C and the upper triangle is not computed.
PartialOutput attend_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t group, double scale,
                            int64_t block_tokens = 128);
PartialGradient attend_causal_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& lse, const at::Tensor& delta,
                                       int64_t group, double scale, int64_t block_tokens = 128);

}  // namespace oomb::attention
