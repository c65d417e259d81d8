// SwiGLU: y = silu(gate) * up, silu(a) = a / (1 + exp(-a)). Shazeer, "GLU Variants" (arXiv 2002.05202).
// gate_up holds gate in columns [0, width) and up in [width, 2 * width) of each row.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct SwigluForward {
  int64_t num_rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [num_rows, 2 * width]
  void* y = nullptr;              ///< [num_rows, width]
};
Status swiglu_forward(const Queue& queue, const SwigluForward& op);

struct SwigluBackward {
  int64_t num_rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [num_rows, 2 * width]
  const void* dy = nullptr;       ///< [num_rows, width]
  void* d_gate_up = nullptr;      ///< [num_rows, 2 * width]; may be gate_up itself
  void* y = nullptr;              ///< [num_rows, width] or null: the forward's output, recomputed on the way
};
Status swiglu_backward(const Queue& queue, const SwigluBackward& op);

}  // namespace oomb::kernels
