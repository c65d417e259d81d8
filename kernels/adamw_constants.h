// What a step of AdamW needs in acc, from the op's doubles: computed once on the host, the same for both devices.
#pragma once

#include <cmath>

#include "kernels/adamw.h"

namespace oomb::kernels {

template <class A>
struct AdamWConstants {
  A lr, beta1, beta2, rest1, rest2, eps, weight_decay, grad_scale, correction1, correction2;

  explicit AdamWConstants(const AdamW& op)
      : lr(static_cast<A>(op.lr)),
        beta1(static_cast<A>(op.beta1)),
        beta2(static_cast<A>(op.beta2)),
        rest1(static_cast<A>(1 - op.beta1)),
        rest2(static_cast<A>(1 - op.beta2)),
        eps(static_cast<A>(op.eps)),
        weight_decay(static_cast<A>(op.weight_decay)),
        grad_scale(static_cast<A>(op.grad_scale)),
        correction1(static_cast<A>(1 - std::pow(op.beta1, static_cast<double>(op.step)))),
        correction2(static_cast<A>(1 - std::pow(op.beta2, static_cast<double>(op.step)))) {}
};

}  // namespace oomb::kernels
