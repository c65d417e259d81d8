// Merge of attention over two key sets on the CPU.
#include "kernels/lse_merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/parallel.h"
#include "kernels/dispatch_pages.h"

namespace oomb::kernels::cpu {

namespace {

/// A strip of a row is widened, merged and narrowed, so that the three element types meet in one plain loop.
constexpr int64_t kStrip = 256;

template <class T, class Acc>
void widen(const void* from, int64_t at, int64_t n, Acc* to) {
  const T* p = static_cast<const T*>(from) + at;
  for (int64_t e = 0; e < n; ++e) to[e] = static_cast<Acc>(load(p[e]));
}

template <class Acc>
void widen(DType type, const void* from, int64_t at, int64_t n, Acc* to) {
  if (type == DType::f64) {
    widen<double>(from, at, n, to);
  } else if (type == DType::f32) {
    widen<float>(from, at, n, to);
  } else {
    widen<bf16>(from, at, n, to);
  }
}

template <class T, class Acc>
void narrow(const Acc* from, int64_t n, void* to, int64_t at) {
  T* p = static_cast<T*>(to) + at;
  for (int64_t e = 0; e < n; ++e) p[e] = store<T>(static_cast<acc_t<T>>(from[e]));
}

template <class Acc>
void narrow(DType type, const Acc* from, int64_t n, void* to, int64_t at) {
  if (type == DType::f64) {
    narrow<double>(from, n, to, at);
  } else if (type == DType::f32) {
    narrow<float>(from, n, to, at);
  } else {
    narrow<bf16>(from, n, to, at);
  }
}

/// out = weight_a * a + weight_b * b; a set of weight 0 is not read.
template <class Acc>
void merge_row(const LseMerge& op, int64_t from, int64_t to, Acc weight_a, Acc weight_b) {
  Acc sum[kStrip], other[kStrip];
  for (int64_t begin = 0; begin < op.head_dim; begin += kStrip) {
    const int64_t n = std::min(kStrip, op.head_dim - begin);
    if (weight_a != Acc(0)) {
      widen(op.a_dtype, op.o_a, from + begin, n, sum);
      for (int64_t e = 0; e < n; ++e) sum[e] *= weight_a;
    } else {
      std::fill(sum, sum + n, Acc(0));
    }
    if (weight_b != Acc(0)) {
      widen(op.b_dtype, op.o_b, from + begin, n, other);
      for (int64_t e = 0; e < n; ++e) sum[e] += weight_b * other[e];
    }
    narrow(op.out_dtype, sum, n, op.out, to + begin);
  }
}

template <class Acc>
Status merge(const LseMerge& op) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  const Acc* lse_a = static_cast<const Acc*>(op.lse_a);
  const Acc* lse_b = static_cast<const Acc*>(op.lse_b);
  Acc* lse = static_cast<Acc*>(op.lse);
  const int64_t rows = op.kv_heads * op.num_tokens * op.group;
  parallel_for(0, rows, grain_for(op.head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Acc a = lse_a[row], b = lse_b != nullptr ? lse_b[row] : kNone;
      const Acc top = std::max(a, b);
      Acc merged = kNone, weight_a = 0, weight_b = 0;
      if (top != kNone) {
        merged = top + std::log(std::exp(a - top) + std::exp(b - top));
        weight_a = std::exp(a - merged);
        weight_b = std::exp(b - merged);
      }
      int64_t to = row;
      if (op.token_major) {
        const int64_t g = row % op.group, c = row / op.group % op.num_tokens, h = row / op.group / op.num_tokens;
        to = (c * op.kv_heads + h) * op.group + g;
      }
      merge_row(op, row * op.head_dim, to * op.head_dim, weight_a, weight_b);
      lse[row] = merged;
    }
  });
  return kOk;
}

}  // namespace

Status lse_merge(const LseMerge& op) {
  return with_acc(op.acc, [&](auto acc) { return merge<decltype(acc)>(op); });
}

}  // namespace oomb::kernels::cpu
