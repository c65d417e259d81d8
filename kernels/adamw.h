// AdamW with decoupled weight decay. Loshchilov and Hutter (arXiv 1711.05101).
//   g = grad * grad_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w = w - lr * (weight_decay * w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
// The corrections 1 - b^t are computed in double from the caller's step count, so that t never sticks. A parameter cut
// into any number of pieces gets the same bits, and so do the two devices.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct AdamW {
  int64_t num_elements = 0;
  DType acc = DType::f32;  ///< f32 or f64: of master, grad, m, v
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double grad_scale = 1.0;     ///< clipping and loss scale in one factor
  int64_t step = 1;            ///< t, counts from 1
  void* master = nullptr;      ///< acc [num_elements], read and written
  const void* grad = nullptr;  ///< acc [num_elements]
  void* m = nullptr;           ///< acc [num_elements]
  void* v = nullptr;           ///< acc [num_elements]
  /// weight_dtype [num_elements] copy of master for the GEMMs, rounded to nearest even; null: none.
  void* weight = nullptr;
  DType weight_dtype = DType::bf16;  ///< acc itself, f32 of an f64 master, or bf16 of an f32 master
};
Status adamw_step(const Queue& queue, const AdamW& op);

/// out[0] += sum of squares of `values` in double, in a fixed order that does not depend on the number of threads.
struct SumOfSquares {
  int64_t num_elements = 0;
  DType dtype = DType::f32;
  const void* values = nullptr;  ///< [num_elements]
  double* out = nullptr;         ///< [1]
  void* workspace = nullptr;     ///< sum_of_squares_workspace_bytes(...) bytes, 16-byte aligned
};
int64_t sum_of_squares_workspace_bytes(const Queue& queue, int64_t num_elements);
Status sum_of_squares(const Queue& queue, const SumOfSquares& op);

}  // namespace oomb::kernels
