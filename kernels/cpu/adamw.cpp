#include "kernels/adamw.h"

#include "kernels/adamw_constants.h"
#include "kernels/blocks.h"
#include "kernels/cpu/adamw_blocks.h"
#include "kernels/cpu/adamw_update.h"
#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

template <class A>
OOMB_CLONES void update(int64_t n, const AdamWConstants<A>& k, A* __restrict master, const A* __restrict grad,
                        A* __restrict m, A* __restrict v) {
  const AdamWConstants<A> c = k;
  for (int64_t i = 0; i < n; ++i) master[i] = adamw_update(c, grad[i], master[i], &m[i], &v[i]);
}

template <class A, class T>
OOMB_CLONES void copy_weights(int64_t n, const A* __restrict master, T* __restrict weight) {
  for (int64_t i = 0; i < n; ++i) weight[i] = store<T>(static_cast<acc_t<T>>(master[i]));
}

template <class T>
OOMB_CLONES double squares_in_double(int64_t n, const T* x) {
  return lane_sum<double>(n, [=](int64_t j) {
    const double v = load(x[j]);
    return v * v;
  });
}

}  // namespace

Status adamw_step(const AdamW& op) {
  if (op.master == nullptr || op.moments == Moments::int8) return adamw_step_in_blocks(op);
  return with_acc(op.acc, [&](auto zero) {
    using A = decltype(zero);
    const AdamWConstants<A> constants(op);
    parallel_for(0, op.num_elements, 16384, [&](int64_t first, int64_t last) {
      // In blocks that stay in the first cache, so that the copy for the GEMMs does not read the master again.
      constexpr int64_t kBlock = 1024;
      A* master = static_cast<A*>(op.master);
      for (int64_t i = first; i < last; i += kBlock) {
        const int64_t n = last - i < kBlock ? last - i : kBlock;
        update(n, constants, master + i, static_cast<const A*>(op.grad) + i, static_cast<A*>(op.m) + i,
               static_cast<A*>(op.v) + i);
        if (op.weight == nullptr) continue;
        if (op.weight_dtype == op.acc) {
          copy_weights(n, master + i, static_cast<A*>(op.weight) + i);
        } else if (op.weight_dtype == DType::f32) {
          copy_weights(n, master + i, static_cast<float*>(op.weight) + i);
        } else if constexpr (sizeof(A) == 4) {
          copy_weights(n, master + i, static_cast<bf16*>(op.weight) + i);
        }
      }
    });
    return kOk;
  });
}

Status sum_of_squares(const SumOfSquares& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    double* partial = static_cast<double*>(op.workspace);
    const int64_t blocks = num_sum_blocks(op.num_elements);
    parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const int64_t begin = b * kSumBlock;
        const int64_t n = op.num_elements - begin < kSumBlock ? op.num_elements - begin : kSumBlock;
        partial[b] = squares_in_double(n, static_cast<const T*>(op.values) + begin);
      }
    });
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += partial[b];
    *op.out += sum;
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
