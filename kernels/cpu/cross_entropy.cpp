#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

/// Largest element of a row. A NaN is not seen here; it shows in the sum.
template <class T>
OOMB_CLONES acc_t<T> row_max(int64_t n, const T* x) {
  using A = acc_t<T>;
  A lanes[kLanes];
  for (A& lane : lanes) lane = -std::numeric_limits<A>::infinity();
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const A v = load(x[j + i]);
      lanes[i] = v > lanes[i] ? v : lanes[i];
    }
  }
  for (; j < n; ++j) lanes[0] = load(x[j]) > lanes[0] ? load(x[j]) : lanes[0];
  for (int i = 1; i < kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

/// Sum of exp(x - max) over up to a block of elements.
template <class T>
OOMB_CLONES acc_t<T> exp_sum(int64_t n, const T* x, acc_t<T> max) {
  return lane_sum<acc_t<T>>(n, [=](int64_t j) { return exp_acc(load(x[j]) - max); });
}

template <class T>
OOMB_CLONES void softmax_row(int64_t n, T* x, acc_t<T> max, acc_t<T> factor) {
  for (int64_t j = 0; j < n; ++j) x[j] = store<T>(factor * exp_acc(load(x[j]) - max));
}

template <class T>
acc_t<T> one_row(const CrossEntropy& op, T* x, int64_t label) {
  using A = acc_t<T>;
  constexpr int64_t kBlock = 4096;
  const A target = load(x[label]);
  const A max = row_max(op.vocab, x);
  double sum = 0;  // over blocks: 150,000 terms would lose digits in float
  for (int64_t j = 0; j < op.vocab; j += kBlock) sum += exp_sum(std::min(kBlock, op.vocab - j), x + j, max);
  if (op.write_grad) {
    const A scale = static_cast<A>(op.grad_scale);
    // The label's element apart, since p - 1 is taken in acc and rounded once.
    const A label_grad = scale * (static_cast<A>(std::exp(static_cast<double>(target - max)) / sum) - A{1});
    softmax_row(op.vocab, x, max, static_cast<A>(op.grad_scale / sum));
    x[label] = store<T>(label_grad);
  }
  return static_cast<A>(std::log(sum) + (static_cast<double>(max) - static_cast<double>(target)));
}

}  // namespace

Status cross_entropy(const CrossEntropy& op) {
  for (int64_t i = 0; i < op.num_rows; ++i) {
    const int64_t label = op.labels[i];
    if (label != kIgnoredLabel && (label < 0 || label >= op.vocab)) {
      return invalid("cross_entropy: a label is neither in [0, vocab) nor -100");
    }
  }
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    parallel_for(0, op.num_rows, grain_for(op.vocab), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        T* x = static_cast<T*>(op.logits) + i * op.row_stride;
        A* loss = static_cast<A*>(op.loss) + i;
        if (op.labels[i] != kIgnoredLabel) {
          *loss = one_row(op, x, op.labels[i]);
          continue;
        }
        *loss = 0;
        if (op.write_grad) std::fill(x, x + op.vocab, store<T>(A{0}));
      }
    });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
