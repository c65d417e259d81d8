#include "kernels/swiglu.h"

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

template <class A>
OOMB_INLINE A sigmoid(A a) {
  return A{1} / (A{1} + exp_acc(-a));
}

template <class T>
OOMB_CLONES void forward_row(int64_t n, const T* gate, const T* up, T* y) {
  for (int64_t j = 0; j < n; ++j) {
    const acc_t<T> a = load(gate[j]);
    y[j] = store<T>(a * sigmoid(a) * load(up[j]));
  }
}

/// d_gate and d_up may be gate and up. y may be null.
template <class T>
OOMB_CLONES void backward_row(int64_t n, const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, T* y) {
  using A = acc_t<T>;
  // Blocks through the stack: the loop over one has no aliasing between what it reads and what it writes.
  constexpr int64_t kBlock = 256;
  T out_gate[kBlock], out_up[kBlock], out_y[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = n - start < kBlock ? n - start : kBlock;
    for (int64_t j = 0; j < count; ++j) {
      const A a = load(gate[start + j]), u = load(up[start + j]), g = load(dy[start + j]);
      const A s = sigmoid(a);
      const A silu = a * s;
      out_gate[j] = store<T>(g * u * (s + silu * (A{1} - s)));
      out_up[j] = store<T>(g * silu);
      out_y[j] = store<T>(silu * u);
    }
    for (int64_t j = 0; j < count; ++j) d_gate[start + j] = out_gate[j];
    for (int64_t j = 0; j < count; ++j) d_up[start + j] = out_up[j];
    if (y != nullptr) {
      for (int64_t j = 0; j < count; ++j) y[start + j] = out_y[j];
    }
  }
}

}  // namespace

Status swiglu_forward(const SwigluForward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = op.width;
    parallel_for(0, op.num_rows, grain_for(n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const T* gate = static_cast<const T*>(op.gate_up) + i * 2 * n;
        forward_row(n, gate, gate + n, static_cast<T*>(op.y) + i * n);
      }
    });
    return kOk;
  });
}

Status swiglu_backward(const SwigluBackward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = op.width;
    parallel_for(0, op.num_rows, grain_for(n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const T* gate = static_cast<const T*>(op.gate_up) + i * 2 * n;
        T* d_gate = static_cast<T*>(op.d_gate_up) + i * 2 * n;
        T* y = op.y != nullptr ? static_cast<T*>(op.y) + i * n : nullptr;
        backward_row(n, gate, gate + n, static_cast<const T*>(op.dy) + i * n, d_gate, d_gate + n, y);
      }
    });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
