#include "kernels/gemm_accumulate.h"

#include <algorithm>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

template <class A, class T>
OOMB_CLONES void axpy(int64_t n, A factor, const T* __restrict x, A* __restrict y) {
  for (int64_t j = 0; j < n; ++j) y[j] += factor * load(x[j]);
}

/// Rows [first, last) of dw, in blocks of columns that stay in the first cache while the chunk's rows pass by.
template <class T>
void rows_of_dw(const GemmAccumulate& op, int64_t first, int64_t last) {
  using A = acc_t<T>;
  constexpr int64_t kColumns = 1024;
  const T* dy = static_cast<const T*>(op.dy);
  const T* x = static_cast<const T*>(op.x);
  for (int64_t o = first; o < last; ++o) {
    for (int64_t j = 0; j < op.in_features; j += kColumns) {
      const int64_t n = std::min(kColumns, op.in_features - j);
      A sum[kColumns] = {};
      for (int64_t r = 0; r < op.num_rows; ++r) {
        axpy(n, load(dy[r * op.dy_row_stride + o]), x + r * op.x_row_stride + j, sum);
      }
      A* dw = static_cast<A*>(op.dw) + o * op.in_features + j;
      for (int64_t c = 0; c < n; ++c) dw[c] += sum[c];
    }
  }
}

}  // namespace

Status gemm_accumulate(const GemmAccumulate& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, op.out_features, grain_for(op.in_features * op.num_rows),
                 [&](int64_t first, int64_t last) { rows_of_dw<T>(op, first, last); });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
