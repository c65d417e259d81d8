// A thread rotates V dimensions of the lower half of a head with V of the upper one. A block takes whole tokens, so
// that its indexes inside are 32-bit; cos and sin are shared by the heads of a token through the first cache.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/rope.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class A>
__global__ void __launch_bounds__(kThreads)
    table_kernel(int64_t elements, int64_t half_dim, double scale, const int64_t* positions, const double* inv_freq,
                 A* cos_out, A* sin_out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t token = i / half_dim;
  double s = 0, c = 0;
  sincos(static_cast<double>(positions[token]) * inv_freq[i - token * half_dim], &s, &c);
  cos_out[i] = static_cast<A>(scale * c);
  sin_out[i] = static_cast<A>(scale * s);
}

template <class T>
struct Apply {
  int64_t num_tokens;
  uint32_t num_heads, half_dim, group, tokens_per_block;
  acc_t<T> sign;
  const T* x;
  int64_t x_token, x_group, x_head;
  T* y;
  int64_t y_token, y_group, y_head;
  const acc_t<T>*cos, *sin;
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads) apply_kernel(Apply<T> op) {
  using A = acc_t<T>;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * op.tokens_per_block;
  const uint32_t packs_per_head = op.half_dim / V;
  const uint32_t packs_per_token = packs_per_head * op.num_heads;
  for (uint32_t i = threadIdx.x; i < packs_per_token * op.tokens_per_block; i += kThreads) {
    const uint32_t local = i / packs_per_token;
    const int64_t token = first_token + local;
    if (token >= op.num_tokens) return;
    const uint32_t in_token = i - local * packs_per_token;
    const uint32_t head = in_token / packs_per_head;
    const uint32_t j = (in_token - head * packs_per_head) * V;
    const uint32_t outer = head / op.group, inner = head - outer * op.group;
    const T* x = op.x + token * op.x_token + outer * op.x_group + inner * op.x_head + j;
    T* y = op.y + token * op.y_token + outer * op.y_group + inner * op.y_head + j;
    Pack<T, V> low = load_vec<V>(x), high = load_vec<V>(x + op.half_dim);
    if (op.cos != nullptr) {
      const int64_t at = token * op.half_dim + j;
      const Pack<A, V> cos = load_vec<V>(op.cos + at), sin = load_vec<V>(op.sin + at);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A a = load(low.v[k]), b = load(high.v[k]), s = op.sign * sin.v[k];
        low.v[k] = store<T>(a * cos.v[k] - b * s);
        high.v[k] = store<T>(b * cos.v[k] + a * s);
      }
    }
    store_vec(y, low);
    store_vec(y + op.half_dim, high);
  }
}

}  // namespace

Status rope_table(void* stream, const RopeTable& op) {
  return with_acc(op.acc, [&](auto zero) {
    using A = decltype(zero);
    const int64_t elements = op.num_tokens * op.half_dim;
    const int64_t blocks = ceil_div(elements, kThreads);
    if (blocks > kMaxBlocks) return invalid("rope_table: too many elements for one grid");
    table_kernel<A><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(
        elements, op.half_dim, op.scale, op.positions, op.inv_freq, static_cast<A*>(op.cos), static_cast<A*>(op.sin));
    return launched();
  });
}

Status rope_apply(void* stream, const RopeApply& args) {
  return with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    constexpr int V = kVec<T>;
    const int64_t half = args.head_dim / 2;
    Apply<T> op{args.num_tokens,
                static_cast<uint32_t>(args.num_heads),
                static_cast<uint32_t>(half),
                static_cast<uint32_t>(args.group < args.num_heads ? args.group : args.num_heads),
                1,
                args.inverse ? A{-1} : A{1},
                static_cast<const T*>(args.x),
                args.x_token_stride,
                args.x_group_stride,
                args.x_head_stride,
                static_cast<T*>(args.y),
                args.y_token_stride,
                args.y_group_stride,
                args.y_head_stride,
                static_cast<const A*>(args.cos),
                static_cast<const A*>(args.sin)};
    const bool packed = half % V == 0 && aligned16(op.x, op.y, op.cos, op.sin) && op.x_token % V == 0 &&
                        op.x_group % V == 0 && op.x_head % V == 0 && op.y_token % V == 0 && op.y_group % V == 0 &&
                        op.y_head % V == 0;
    const int64_t per_token = args.num_heads * (packed ? half / V : half);
    op.tokens_per_block = static_cast<uint32_t>(per_token >= kThreads ? 1 : kThreads / per_token);
    const int64_t blocks = ceil_div(op.num_tokens, op.tokens_per_block);
    if (blocks > kMaxBlocks) return invalid("rope_apply: too many tokens for one grid");
    if (packed) {
      apply_kernel<T, V><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(op);
    } else {
      apply_kernel<T, 1><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(op);
    }
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
