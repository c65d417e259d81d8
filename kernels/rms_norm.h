// Root-mean-square layer normalisation with the residual addition that precedes it.
//   sum = x + delta                 (delta == nullptr: sum = x)
//   r   = 1 / sqrt(mean(sum^2) + eps),   y = sum * r * weight
// Backward, with g = dy * weight:
//   dx = d_residual + r * (g - sum * r^2 * mean(g * sum)),   dweight += sum_rows(dy * sum * r)
// Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct RmsNormForward {
  int64_t num_rows = 0, hidden = 0;
  DType dtype = DType::f32;  ///< of x, delta, weight, sum, y
  double eps = 0;
  const void* x = nullptr;       ///< [num_rows, hidden]
  const void* delta = nullptr;   ///< [num_rows, hidden] or null
  const void* weight = nullptr;  ///< [hidden]
  void* sum = nullptr;      ///< [num_rows, hidden], x + delta rounded to dtype; may be x itself; unused without delta
  void* y = nullptr;        ///< [num_rows, hidden]
  void* inv_rms = nullptr;  ///< acc [num_rows], the r above
};
Status rms_norm_forward(const Queue& queue, const RmsNormForward& op);

struct RmsNormBackward {
  int64_t num_rows = 0, hidden = 0;
  DType dtype = DType::f32;          ///< of dy, x, weight, d_residual, dx
  const void* dy = nullptr;          ///< [num_rows, hidden]
  const void* x = nullptr;           ///< [num_rows, hidden], the forward's sum
  const void* weight = nullptr;      ///< [hidden]
  const void* inv_rms = nullptr;     ///< acc [num_rows]
  const void* d_residual = nullptr;  ///< [num_rows, hidden] or null (zero)
  void* dx = nullptr;                ///< [num_rows, hidden]; may be dy or d_residual itself
  void* dweight = nullptr;           ///< acc [hidden], added to
  void* workspace = nullptr;         ///< rms_norm_backward_workspace_bytes(...) bytes, 16-byte aligned
};
int64_t rms_norm_backward_workspace_bytes(const Queue& queue, int64_t num_rows, int64_t hidden, DType dtype);
Status rms_norm_backward(const Queue& queue, const RmsNormBackward& op);

}  // namespace oomb::kernels
