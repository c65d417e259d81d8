// Attention of query rows over one contiguous key set: the choice of implementation.
//
// For bf16 on a GPU LibTorch's cuDNN attention (in deterministic mode its flash attention), for f32 on a CPU its fused
// CPU attention, else dense_math.h. Key sets
// are computed apart and merged; with the merged log-sum-exp in the backward pass their gradients are independent and
// exact.
#pragma once

#include <ATen/ATen.h>

#include "worker/attention/dense_math.h"

namespace oomb::attention {

/// Whether the implementation for q stores the scores of all rows and keys at once.
bool stores_scores(const at::Tensor& q);

/// What the backward of every key set needs of the merged output. Layout as q: [Hkv, C, G, D] or a block of it
/// [tiles, Hkv, rows, D]; lse and delta without D.
struct MergedRows {
  at::Tensor d_o;    ///< compute dtype
  at::Tensor o;      ///< compute dtype, merged
  at::Tensor lse;    ///< acc, merged
  at::Tensor delta;  ///< acc, rowsum(d_o * o); undefined where the implementation forms it itself

  template <typename F>
  MergedRows map(F&& f) const {
    return {f(d_o), f(o), f(lse), delta.defined() ? f(delta) : at::Tensor()};
  }
};
MergedRows merged_rows(const at::Tensor& d_o, const at::Tensor& o, const at::Tensor& lse);

/// Every row sees every key: q [tiles, Hkv, R, D], k and v [tiles, Hkv, K, D].
PartialOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);
PartialGradient attend_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                double scale);

/// Causal within the chunk: q [Hkv, C, G, D], k and v [Hkv, C, 1, D]; o as q, lse [Hkv, C, G].
PartialOutput attend_own_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);
PartialGradient attend_own_chunk_backward(const MergedRows& rows, const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, double scale);

}  // namespace oomb::attention
