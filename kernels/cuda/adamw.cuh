// One element of AdamW, the same expression for every form of weights and moments. For files compiled without
// contraction to FMA only: the CPU reference has the same bits.
#pragma once

#include "kernels/adamw_constants.h"

namespace oomb::kernels::cuda {

/// Updates m and v in place; returns the new weight.
template <class A>
__device__ inline A adamw_update(const AdamWConstants<A>& c, A grad, A w, A& m, A& v) {
  const A g = grad * c.grad_scale;
  m = c.beta1 * m + c.rest1 * g;
  v = c.beta2 * v + c.rest2 * (g * g);
  return w - c.lr * (c.weight_decay * w + (m / c.correction1) / (sqrt(v / c.correction2) + c.eps));
}

}  // namespace oomb::kernels::cuda
