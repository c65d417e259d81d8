#include "kernels/rope.h"

#include <cmath>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

/// One head: `sign` is -1 for the transpose. x and y may be the same.
template <class T>
OOMB_CLONES void rotate(int64_t half, const T* x, T* y, const acc_t<T>* cos, const acc_t<T>* sin, acc_t<T> sign) {
  using A = acc_t<T>;
#pragma GCC ivdep  // x and y are the same or apart: the strides are equal in place
  for (int64_t j = 0; j < half; ++j) {
    const A a = load(x[j]), b = load(x[j + half]);
    const A s = sign * sin[j];
    y[j] = store<T>(a * cos[j] - b * s);
    y[j + half] = store<T>(b * cos[j] + a * s);
  }
}

}  // namespace

Status rope_table(const RopeTable& op) {
  return with_acc(op.acc, [&](auto zero) {
    using A = decltype(zero);
    parallel_for(0, op.num_tokens, grain_for(op.half_dim * 16), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const double position = static_cast<double>(op.positions[i]);
        for (int64_t j = 0; j < op.half_dim; ++j) {
          const double angle = position * op.inv_freq[j];
          static_cast<A*>(op.cos)[i * op.half_dim + j] = static_cast<A>(op.scale * std::cos(angle));
          static_cast<A*>(op.sin)[i * op.half_dim + j] = static_cast<A>(op.scale * std::sin(angle));
        }
      }
    });
    return kOk;
  });
}

Status rope_apply(const RopeApply& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const int64_t half = op.head_dim / 2;
    parallel_for(0, op.num_tokens, grain_for(op.num_heads * op.head_dim), [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        for (int64_t h = 0; h < op.num_heads; ++h) {
          const int64_t outer = h / op.group, inner = h % op.group;
          const T* x = static_cast<const T*>(op.x) + c * op.x_token_stride + outer * op.x_group_stride +
                       inner * op.x_head_stride;
          T* y = static_cast<T*>(op.y) + c * op.y_token_stride + outer * op.y_group_stride + inner * op.y_head_stride;
          if (op.cos == nullptr) {
            if (x != y) {
              for (int64_t j = 0; j < op.head_dim; ++j) y[j] = x[j];
            }
            continue;
          }
          rotate(half, x, y, static_cast<const A*>(op.cos) + c * half, static_cast<const A*>(op.sin) + c * half,
                 op.inverse ? A{-1} : A{1});
        }
      }
    });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
