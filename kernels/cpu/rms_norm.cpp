#include "kernels/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

template <class T>
OOMB_CLONES void add_rows(int64_t n, const T* x, const T* delta, T* sum) {
  for (int64_t j = 0; j < n; ++j) sum[j] = store<T>(load(x[j]) + load(delta[j]));
}

/// Sum of squares of one row.
template <class T>
OOMB_CLONES acc_t<T> squares(int64_t n, const T* x) {
  return lane_sum<acc_t<T>>(n, [=](int64_t j) { return load(x[j]) * load(x[j]); });
}

template <class T>
OOMB_CLONES void scale_row(int64_t n, const T* x, const T* weight, acc_t<T> r, T* y) {
  for (int64_t j = 0; j < n; ++j) y[j] = store<T>(load(x[j]) * r * load(weight[j]));
}

template <class T>
OOMB_CLONES acc_t<T> dot_row(int64_t n, const T* dy, const T* x, const T* weight) {
  return lane_sum<acc_t<T>>(n, [=](int64_t j) { return load(dy[j]) * load(weight[j]) * load(x[j]); });
}

/// dx = residual + r * (dy * weight - x * c)
template <class T>
OOMB_CLONES void dx_row(int64_t n, const T* dy, const T* x, const T* weight, const T* residual, acc_t<T> r, acc_t<T> c,
                        T* dx) {
  if (residual != nullptr) {
    for (int64_t j = 0; j < n; ++j) {
      dx[j] = store<T>(load(residual[j]) + r * (load(dy[j]) * load(weight[j]) - load(x[j]) * c));
    }
  } else {
    for (int64_t j = 0; j < n; ++j) dx[j] = store<T>(r * (load(dy[j]) * load(weight[j]) - load(x[j]) * c));
  }
}

/// part += dy * x * r over one row.
template <class T>
OOMB_CLONES void dweight_row(int64_t n, const T* dy, const T* x, acc_t<T> r, acc_t<T>* part) {
  for (int64_t j = 0; j < n; ++j) part[j] += load(dy[j]) * (load(x[j]) * r);
}

/// dweight over columns [first, last): rows in blocks, so that a long chunk does not round at the size of its own sum.
template <class T>
void dweight_columns(const RmsNormBackward& op, int64_t first, int64_t last) {
  constexpr int64_t kColumns = 512, kRows = 64;
  using A = acc_t<T>;
  const T* dy = static_cast<const T*>(op.dy);
  const T* x = static_cast<const T*>(op.x);
  const A* inv_rms = static_cast<const A*>(op.inv_rms);
  A* dweight = static_cast<A*>(op.dweight);
  for (int64_t j = first; j < last; j += kColumns) {
    const int64_t n = std::min(kColumns, last - j);
    A total[kColumns] = {};
    for (int64_t row = 0; row < op.num_rows; row += kRows) {
      A part[kColumns] = {};
      for (int64_t i = row; i < std::min(row + kRows, op.num_rows); ++i) {
        dweight_row(n, dy + i * op.hidden + j, x + i * op.hidden + j, inv_rms[i], part);
      }
      for (int64_t c = 0; c < n; ++c) total[c] += part[c];
    }
    for (int64_t c = 0; c < n; ++c) dweight[j + c] += total[c];
  }
}

}  // namespace

Status rms_norm_forward(const RmsNormForward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const int64_t n = op.hidden;
    parallel_for(0, op.num_rows, grain_for(n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const T* x = static_cast<const T*>(op.x) + i * n;
        if (op.delta != nullptr) {
          T* sum = static_cast<T*>(op.sum) + i * n;
          add_rows(n, x, static_cast<const T*>(op.delta) + i * n, sum);
          x = sum;
        }
        const A mean = squares(n, x) / static_cast<A>(n);
        const A r = A{1} / std::sqrt(mean + static_cast<A>(op.eps));
        static_cast<A*>(op.inv_rms)[i] = r;
        scale_row(n, x, static_cast<const T*>(op.weight), r, static_cast<T*>(op.y) + i * n);
      }
    });
    return kOk;
  });
}

Status rms_norm_backward(const RmsNormBackward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const int64_t n = op.hidden;
    // Weight gradient first: dx may overwrite dy.
    parallel_for(0, n, std::max<int64_t>(64, grain_for(op.num_rows)),
                 [&](int64_t first, int64_t last) { dweight_columns<T>(op, first, last); });
    parallel_for(0, op.num_rows, grain_for(n), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const T* dy = static_cast<const T*>(op.dy) + i * n;
        const T* x = static_cast<const T*>(op.x) + i * n;
        const T* weight = static_cast<const T*>(op.weight);
        const T* residual = op.d_residual != nullptr ? static_cast<const T*>(op.d_residual) + i * n : nullptr;
        const A r = static_cast<const A*>(op.inv_rms)[i];
        const A c = r * r * (dot_row(n, dy, x, weight) / static_cast<A>(n));
        dx_row(n, dy, x, weight, residual, r, c, static_cast<T*>(op.dx) + i * n);
      }
    });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
