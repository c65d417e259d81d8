// Merge of attention over two key sets on CUDA: bound by memory. The element types are looked up per access (the branch
// is the same for all threads), so that 27 combinations of types need two kernels.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/dispatch_pages.h"
#include "kernels/lse_merge.h"

namespace oomb::kernels::cuda {

namespace {

constexpr int kThreads = 256;

template <class T, int V, class Acc>
__device__ void widen(const void* from, int64_t at, Acc (&to)[V]) {
  constexpr int kPart = V < kVec<T> ? V : kVec<T>;
  const T* source = static_cast<const T*>(from) + at;
#pragma unroll
  for (int p = 0; p < V / kPart; ++p) {
    const Pack<T, kPart> part = *reinterpret_cast<const Pack<T, kPart>*>(source + p * kPart);
#pragma unroll
    for (int e = 0; e < kPart; ++e) to[p * kPart + e] = static_cast<Acc>(load(part.v[e]));
  }
}

template <class T, int V, class Acc>
__device__ void narrow(const Acc (&from)[V], void* to, int64_t at) {
  constexpr int kPart = V < kVec<T> ? V : kVec<T>;
  T* target = static_cast<T*>(to) + at;
#pragma unroll
  for (int p = 0; p < V / kPart; ++p) {
    Pack<T, kPart> part;
#pragma unroll
    for (int e = 0; e < kPart; ++e) part.v[e] = store<T>(static_cast<acc_t<T>>(from[p * kPart + e]));
    *reinterpret_cast<Pack<T, kPart>*>(target + p * kPart) = part;
  }
}

template <int V, class Acc>
__device__ void widen(DType type, const void* from, int64_t at, Acc (&to)[V]) {
  if (type == DType::bf16) {
    widen<bf16>(from, at, to);
  } else if (type == DType::f32) {
    widen<float>(from, at, to);
  } else {
    widen<double>(from, at, to);
  }
}

template <int V, class Acc>
__device__ void narrow(DType type, const Acc (&from)[V], void* to, int64_t at) {
  if (type == DType::bf16) {
    narrow<bf16>(from, to, at);
  } else if (type == DType::f32) {
    narrow<float>(from, to, at);
  } else {
    narrow<double>(from, to, at);
  }
}

/// `lanes` threads (a power of two, at most a warp) share a row; each takes packs of V elements. `lse` may be `lse_a`:
/// the row's lanes are in one warp and all have read it before lane 0 writes.
template <class Acc, int V>
__global__ void __launch_bounds__(kThreads) merge_kernel(LseMerge op, int64_t rows, int lanes) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = thread / lanes;
  const int lane = static_cast<int>(thread % lanes);
  const bool inside = row < rows;
  const Acc none = -static_cast<Acc>(INFINITY);
  Acc a = none, b = none;
  if (inside) {
    a = static_cast<const Acc*>(op.lse_a)[row];
    if (op.lse_b != nullptr) b = static_cast<const Acc*>(op.lse_b)[row];
  }
  __syncwarp();
  if (!inside) return;
  Acc merged = none, weight_a = 0, weight_b = 0;
  const Acc top = a < b ? b : a;  // a NaN in a stays, one in b reaches the sum below
  if (top != none) {
    merged = top + log(exp(a - top) + exp(b - top));
    weight_a = exp(a - merged);
    weight_b = exp(b - merged);
  }
  int64_t to = row;
  if (op.token_major) {
    const int64_t g = row % op.group, c = row / op.group % op.num_tokens, h = row / op.group / op.num_tokens;
    to = (c * op.kv_heads + h) * op.group + g;
  }
  for (int64_t element = int64_t{lane} * V; element < op.head_dim; element += int64_t{lanes} * V) {
    Acc sum[V] = {}, other[V] = {};
    const int64_t from = row * op.head_dim + element;
    if (weight_a != Acc(0)) widen(op.a_dtype, op.o_a, from, sum);
    if (weight_b != Acc(0)) widen(op.b_dtype, op.o_b, from, other);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] = sum[e] * weight_a + other[e] * weight_b;
    narrow(op.out_dtype, sum, op.out, to * op.head_dim + element);
  }
  if (lane == 0) static_cast<Acc*>(op.lse)[row] = merged;
}

template <class Acc, int V>
Status launch(cudaStream_t stream, const LseMerge& op) {
  const int64_t rows = op.kv_heads * op.num_tokens * op.group;
  int lanes = 1;
  while (lanes < 32 && int64_t{lanes} * V < op.head_dim) lanes *= 2;
  const int64_t grid = ceil_div(rows, kThreads / lanes);
  if (grid > kMaxBlocks) return invalid("lse_merge: more rows than one grid holds");
  merge_kernel<Acc, V><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(op, rows, lanes);
  return launched();
}

}  // namespace

Status lse_merge(void* stream, const LseMerge& op) {
  constexpr int kPack = 8;
  const bool packs = op.head_dim % kPack == 0 && aligned16(op.o_a, op.o_b, op.out);
  return with_acc(op.acc, [&](auto acc) {
    using Acc = decltype(acc);
    return packs ? launch<Acc, kPack>(stream_of(stream), op) : launch<Acc, 1>(stream_of(stream), op);
  });
}

}  // namespace oomb::kernels::cuda
