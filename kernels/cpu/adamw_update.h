// One element of AdamW, the same expression for every form of weights and moments.
#pragma once

#include "kernels/adamw_constants.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {

OOMB_INLINE float root(float x) { return __builtin_sqrtf(x); }
OOMB_INLINE double root(double x) { return __builtin_sqrt(x); }

/// Updates m and v in place; returns the new weight.
template <class A>
OOMB_INLINE A adamw_update(const AdamWConstants<A>& c, A grad, A w, A* m, A* v) {
  const A g = grad * c.grad_scale;
  const A mi = c.beta1 * *m + c.rest1 * g;
  const A vi = c.beta2 * *v + c.rest2 * (g * g);
  *m = mi;
  *v = vi;
  return w - c.lr * (c.weight_decay * w + (mi / c.correction1) / (root(vi / c.correction2) + c.eps));
}

}  // namespace oomb::kernels::cpu
