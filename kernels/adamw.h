// AdamW with decoupled weight decay. Loshchilov and Hutter (arXiv 1711.05101).
//   g = grad * grad_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w = w - lr * (weight_decay * w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
// The corrections 1 - b^t are computed in double from the caller's step count, so that t never sticks. A parameter cut
// into any number of pieces gets the same bits, and so do the two devices.
//
// Two choices, in all four combinations:
// - Weights: `master` in acc, and `weight` its rounded copy; or no master, and `weight` in bf16 is itself what is
//   updated, in fp32 and rounded stochastically: its expected value is the updated weight.
// - Moments: in acc; or 8-bit codes with one scale per kMomentBlock elements (moment_code.h: the code, its error, and
//   why). The weight's update uses the new moments before they are coded.
// Random bits are a function of (random_key, step, element index), so nothing of them is stored, and pieces that begin
// at multiples of kMomentBlock give the bits of the whole. Cost at least, bytes per parameter with a bf16 weight:
// 30 (acc f32, master), 24 (acc f32, no master), 18 + 1/16 (codes, master), 12 + 1/16 (codes, no master).
#pragma once

#include "kernels/moment_code.h"
#include "kernels/types.h"

namespace oomb::kernels {

enum class Moments : uint8_t { acc, int8 };

struct AdamW {
  int64_t num_elements = 0;
  DType acc = DType::f32;  ///< f32 or f64: of master, grad, m, v; f32 if without master or with int8 moments
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double grad_scale = 1.0;     ///< clipping and loss scale in one factor
  int64_t step = 1;            ///< t, counts from 1
  void* master = nullptr;      ///< acc [num_elements], read and written; null: none, see above
  const void* grad = nullptr;  ///< acc [num_elements], finite
  void* m = nullptr;           ///< acc [num_elements], or uint8 codes [num_elements]; zero bytes are zero in both
  void* v = nullptr;           ///< like m
  /// weight_dtype [num_elements]. With a master: its copy for the GEMMs, rounded to nearest even; null: none. Without:
  /// bf16, read and written.
  void* weight = nullptr;
  DType weight_dtype = DType::bf16;  ///< acc itself, f32 of an f64 master, or bf16 of an f32 master
  Moments moments = Moments::acc;
  float* m_scale = nullptr;   ///< [num_moment_blocks(num_elements)], with int8 moments; NaN: a moment is not finite
  float* v_scale = nullptr;   ///< like m_scale
  uint64_t random_key = 0;    ///< of the parameter: different keys give independent bits
  int64_t first_element = 0;  ///< of this piece in its parameter, a multiple of kMomentBlock
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
