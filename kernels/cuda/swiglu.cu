// One pack of V columns per thread over the flat index of y; the row is needed only to find gate and up.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/swiglu.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class A>
__device__ A sigmoid(A a) {
  return A{1} / (A{1} + exp(-a));
}

/// Offsets of this thread's pack: in y, and of its gate in gate_up. One 64-bit division per block, the rest in 32 bits.
struct Place {
  int64_t y, gate;
  __device__ Place(int64_t packs_per_row, int V) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads;
    const int64_t first_row = first / packs_per_row;
    const int64_t local = first - first_row * packs_per_row + threadIdx.x;
    const int64_t row = first_row + (packs_per_row < (int64_t{1} << 31)
                                         ? static_cast<uint32_t>(local) / static_cast<uint32_t>(packs_per_row)
                                         : local / packs_per_row);
    const int64_t pack = first + threadIdx.x;
    y = pack * V;
    gate = (pack + row * packs_per_row) * V;
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(int64_t packs, int64_t packs_per_row, const T* gate_up, T* y) {
  if (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x >= packs) return;
  const Place at(packs_per_row, V);
  const Pack<T, V> gate = load_vec<V>(gate_up + at.gate);
  const Pack<T, V> up = load_vec<V>(gate_up + at.gate + packs_per_row * V);
  Pack<T, V> out;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const acc_t<T> a = load(gate.v[i]);
    out.v[i] = store<T>(a * sigmoid(a) * load(up.v[i]));
  }
  store_vec(y + at.y, out);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(int64_t packs, int64_t packs_per_row, const T* gate_up, const T* dy, T* d_gate_up, T* y) {
  using A = acc_t<T>;
  if (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x >= packs) return;
  const Place at(packs_per_row, V);
  const Pack<T, V> gate = load_vec<V>(gate_up + at.gate);
  const Pack<T, V> up = load_vec<V>(gate_up + at.gate + packs_per_row * V);
  const Pack<T, V> grad = load_vec<V>(dy + at.y);
  Pack<T, V> d_gate, d_up, out;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const A a = load(gate.v[i]), u = load(up.v[i]), g = load(grad.v[i]);
    const A s = sigmoid(a);
    const A silu = a * s;
    d_gate.v[i] = store<T>(g * u * (s + silu * (A{1} - s)));
    d_up.v[i] = store<T>(g * silu);
    out.v[i] = store<T>(silu * u);
  }
  store_vec(d_gate_up + at.gate, d_gate);
  store_vec(d_gate_up + at.gate + packs_per_row * V, d_up);
  if (y != nullptr) store_vec(y + at.y, out);
}

}  // namespace

Status swiglu_forward(void* stream, const SwigluForward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* gate_up = static_cast<const T*>(op.gate_up);
    T* y = static_cast<T*>(op.y);
    const bool packed = op.width % kVec<T> == 0 && aligned16(gate_up, y);
    const int64_t per_row = packed ? op.width / kVec<T> : op.width;
    const int64_t packs = op.num_rows * per_row;
    const int64_t blocks = ceil_div(packs, kThreads);
    if (blocks > kMaxBlocks) return invalid("swiglu_forward: too many elements for one grid");
    const unsigned grid = static_cast<unsigned>(blocks);
    if (packed) {
      forward_kernel<T, kVec<T>><<<grid, kThreads, 0, stream_of(stream)>>>(packs, per_row, gate_up, y);
    } else {
      forward_kernel<T, 1><<<grid, kThreads, 0, stream_of(stream)>>>(packs, per_row, gate_up, y);
    }
    return launched();
  });
}

Status swiglu_backward(void* stream, const SwigluBackward& op) {
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* gate_up = static_cast<const T*>(op.gate_up);
    const T* dy = static_cast<const T*>(op.dy);
    T* d_gate_up = static_cast<T*>(op.d_gate_up);
    T* y = static_cast<T*>(op.y);
    const bool packed = op.width % kVec<T> == 0 && aligned16(gate_up, dy, d_gate_up, y);
    const int64_t per_row = packed ? op.width / kVec<T> : op.width;
    const int64_t packs = op.num_rows * per_row;
    const int64_t blocks = ceil_div(packs, kThreads);
    if (blocks > kMaxBlocks) return invalid("swiglu_backward: too many elements for one grid");
    const unsigned grid = static_cast<unsigned>(blocks);
    if (packed) {
      backward_kernel<T, kVec<T>><<<grid, kThreads, 0, stream_of(stream)>>>(packs, per_row, gate_up, dy, d_gate_up, y);
    } else {
      backward_kernel<T, 1><<<grid, kThreads, 0, stream_of(stream)>>>(packs, per_row, gate_up, dy, d_gate_up, y);
    }
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
