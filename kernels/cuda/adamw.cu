// AdamW, and the sum of squares for clipping. Compiled without contraction to FMA: the CPU reference, the packed and
// the scalar path then give the same bits, and so does any cut of the parameters into pieces.
#include "kernels/adamw.h"
#include "kernels/adamw_constants.h"
#include "kernels/blocks.h"
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/adamw_blocks.h"
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.cuh"

namespace oomb::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class A, class W>
struct Args {
  int64_t num_elements;
  AdamWConstants<A> c;
  A* master;
  const A* grad;
  A *m, *v;
  W* weight;
};

/// V elements per thread; the last thread may have fewer.
template <class A, class W, int V>
__global__ void __launch_bounds__(kThreads) adamw_kernel(Args<A, W> op) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (at >= op.num_elements) return;
  const bool whole = at + V <= op.num_elements;
  const int count = whole ? V : static_cast<int>(op.num_elements - at);
  Pack<A, V> master, grad, m, v;
  if (whole) {
    master = load_vec<V>(op.master + at);
    grad = load_vec<V>(op.grad + at);
    m = load_vec<V>(op.m + at);
    v = load_vec<V>(op.v + at);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int64_t k = at + (i < count ? i : 0);
      master.v[i] = op.master[k];
      grad.v[i] = op.grad[k];
      m.v[i] = op.m[k];
      v.v[i] = op.v[k];
    }
  }
  Pack<W, V> weight;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    master.v[i] = adamw_update(op.c, grad.v[i], master.v[i], m.v[i], v.v[i]);
    weight.v[i] = store<W>(static_cast<acc_t<W>>(master.v[i]));
  }
  if (whole) {
    store_vec(op.master + at, master);
    store_vec(op.m + at, m);
    store_vec(op.v + at, v);
    if (op.weight != nullptr) store_vec(op.weight + at, weight);
    return;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (i >= count) break;
    op.master[at + i] = master.v[i];
    op.m[at + i] = m.v[i];
    op.v[at + i] = v.v[i];
    if (op.weight != nullptr) op.weight[at + i] = weight.v[i];
  }
}

template <class A, class W>
Status launch(const AdamW& args, cudaStream_t stream) {
  constexpr int V = kVec<A>;
  const Args<A, W> op{
      args.num_elements,       AdamWConstants<A>(args), static_cast<A*>(args.master), static_cast<const A*>(args.grad),
      static_cast<A*>(args.m), static_cast<A*>(args.v), static_cast<W*>(args.weight)};
  const bool packed = aligned16(op.master, op.grad, op.m, op.v, op.weight);
  const int64_t blocks = ceil_div(op.num_elements, static_cast<int64_t>(kThreads) * (packed ? V : 1));
  if (blocks > kMaxBlocks) return invalid("adamw_step: too many elements for one grid");
  if (packed) {
    adamw_kernel<A, W, V><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op);
  } else {
    adamw_kernel<A, W, 1><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op);
  }
  return launched();
}

/// One block per kSumBlock elements. Aligned or not, a thread takes the same elements in the same order.
template <class T, bool Packed>
__global__ void __launch_bounds__(kThreads) squares_kernel(int64_t num_elements, const T* values, double* partial) {
  constexpr int V = kVec<T>;
  __shared__ double scratch[32];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSumBlock;
  double sum = 0;
#pragma unroll 4
  for (int round = 0; round < kSumBlock / (kThreads * V); ++round) {
    const int64_t at = begin + (static_cast<int64_t>(round) * kThreads + threadIdx.x) * V;
    if (Packed && at + V <= num_elements) {
      const Pack<T, V> pack = load_vec<V>(values + at);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const double x = static_cast<double>(load(pack.v[i]));
        sum += x * x;
      }
    } else {
      for (int i = 0; i < V && at + i < num_elements; ++i) {
        const double x = static_cast<double>(load(values[at + i]));
        sum += x * x;
      }
    }
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) add_partials_kernel(int64_t count, const double* partial, double* out) {
  __shared__ double scratch[32];
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += 1024) sum += partial[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *out += sum;
}

}  // namespace

Status adamw_step(void* queue_stream, const AdamW& op) {
  if (op.master == nullptr || op.moments == Moments::int8) return adamw_step_in_blocks(queue_stream, op);
  const cudaStream_t stream = stream_of(queue_stream);
  if (op.acc == DType::f64) {
    return op.weight_dtype == DType::f32 ? launch<double, float>(op, stream) : launch<double, double>(op, stream);
  }
  return op.weight_dtype == DType::bf16 ? launch<float, bf16>(op, stream) : launch<float, float>(op, stream);
}

Status sum_of_squares(void* queue_stream, const SumOfSquares& op) {
  const cudaStream_t stream = stream_of(queue_stream);
  const int64_t blocks = num_sum_blocks(op.num_elements);
  if (blocks > kMaxBlocks) return invalid("sum_of_squares: too many elements for one grid");
  double* partial = static_cast<double*>(op.workspace);
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* values = static_cast<const T*>(op.values);
    if (aligned16(values)) {
      squares_kernel<T, true><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op.num_elements, values, partial);
    } else {
      squares_kernel<T, false>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op.num_elements, values, partial);
    }
    if (Status s = launched(); !s) return s;
    add_partials_kernel<<<1, 1024, 0, stream>>>(blocks, partial, op.out);
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
