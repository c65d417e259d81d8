// Rotary position embedding, half-split form (dimension j is rotated with dimension j + D/2), as Hugging Face models
// store their weights. Su et al., "RoFormer" (arXiv 2104.09864).
//   y[j]       = x[j] cos - x[j + D/2] sin
//   y[j + D/2] = x[j + D/2] cos + x[j] sin,     angle = position * inv_freq[j]
// `inverse` applies the transpose (the backward pass): sin changes sign.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

/// Fills cos and sin for the tokens of a chunk. Angles are formed in double: at 4M tokens fp32 angles are off by 0.2.
struct RopeTable {
  int64_t num_tokens = 0, half_dim = 0;
  DType acc = DType::f32;              ///< f32 or f64, type of cos and sin
  double scale = 1.0;                  ///< attention factor: multiplies cos and sin
  const int64_t* positions = nullptr;  ///< [num_tokens]
  const double* inv_freq = nullptr;    ///< [half_dim]
  void* cos = nullptr;                 ///< acc [num_tokens, half_dim]
  void* sin = nullptr;                 ///< acc [num_tokens, half_dim]
};
Status rope_table(const Queue& queue, const RopeTable& op);

/// Rotates `num_heads` heads of each token. Element (token c, head h, dim j) of x is at
/// x[c * x_token_stride + (h / group) * x_group_stride + (h % group) * x_head_stride + j], and so for y. With `group` =
/// Hq/Hkv this writes queries straight into the [Hkv, C, G, D] layout of the attention. y may be x if the strides are
/// equal.
struct RopeApply {
  int64_t num_tokens = 0, num_heads = 0, head_dim = 0, group = 1;
  DType dtype = DType::f32;
  bool inverse = false;
  const void* x = nullptr;
  int64_t x_token_stride = 0, x_group_stride = 0, x_head_stride = 0;
  void* y = nullptr;
  int64_t y_token_stride = 0, y_group_stride = 0, y_head_stride = 0;
  const void* cos = nullptr;  ///< acc [num_tokens, head_dim / 2]; null together with sin: a plain strided copy
  const void* sin = nullptr;
};
Status rope_apply(const Queue& queue, const RopeApply& op);

}  // namespace oomb::kernels
