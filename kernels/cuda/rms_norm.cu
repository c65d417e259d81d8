// One block per row. A thread keeps its part of the row in registers (Items packs of V elements), so that x is read
// once; rows too long or unaligned for that take the path Items = 0, which reads the row again from the caches.
// Backward: each block walks rows a grid apart and keeps its part of the weight gradient in registers; the blocks'
// parts go to the workspace and a second kernel adds them up in the order of the blocks.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.cuh"
#include "kernels/rms_norm.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kScalarThreads = 256;

template <class T>
struct Forward {
  int64_t num_rows, hidden;
  acc_t<T> eps;
  const T *x, *delta, *weight;
  T *sum, *y;
  acc_t<T>* inv_rms;
};

template <class T>
struct Backward {
  int64_t num_rows, hidden;
  const T *dy, *x, *weight;
  const acc_t<T>* inv_rms;
  const T* residual;
  T* dx;
  acc_t<T>* partial;  ///< [gridDim.x, hidden]
};

template <class T, int V, int Items>
__global__ void __launch_bounds__(1024) forward_kernel(Forward<T> op) {
  using A = acc_t<T>;
  __shared__ A scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < op.num_rows; row += gridDim.x, turn ^= 1) {
    const int64_t at = row * op.hidden;
    Pack<T, V> kept[Items];
    A squares = 0;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
      if (j >= op.hidden) continue;
      kept[item] = load_vec<V>(op.x + at + j);
      if (op.delta != nullptr) {
        const Pack<T, V> delta = load_vec<V>(op.delta + at + j);
#pragma unroll
        for (int i = 0; i < V; ++i) kept[item].v[i] = store<T>(load(kept[item].v[i]) + load(delta.v[i]));
        store_vec(op.sum + at + j, kept[item]);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) squares += load(kept[item].v[i]) * load(kept[item].v[i]);
    }
    const A mean = block_sum(squares, scratch[turn]) / static_cast<A>(op.hidden);
    const A r = A{1} / sqrt(mean + op.eps);
    if (threadIdx.x == 0) op.inv_rms[row] = r;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
      if (j >= op.hidden) continue;
      const Pack<T, V> weight = load_vec<V>(op.weight + j);
#pragma unroll
      for (int i = 0; i < V; ++i) kept[item].v[i] = store<T>(load(kept[item].v[i]) * r * load(weight.v[i]));
      store_vec(op.y + at + j, kept[item]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kScalarThreads) forward_scalar_kernel(Forward<T> op) {
  using A = acc_t<T>;
  __shared__ A scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < op.num_rows; row += gridDim.x, turn ^= 1) {
    const int64_t at = row * op.hidden;
    const T* x = op.x + at;
    A squares = 0;
    for (int64_t j = threadIdx.x; j < op.hidden; j += kScalarThreads) {
      T value = x[j];
      if (op.delta != nullptr) op.sum[at + j] = value = store<T>(load(value) + load(op.delta[at + j]));
      squares += load(value) * load(value);
    }
    const A mean = block_sum(squares, scratch[turn]) / static_cast<A>(op.hidden);
    const A r = A{1} / sqrt(mean + op.eps);
    if (threadIdx.x == 0) op.inv_rms[row] = r;
    const T* kept = op.delta != nullptr ? op.sum + at : x;  // each thread reads what it wrote itself
    for (int64_t j = threadIdx.x; j < op.hidden; j += kScalarThreads) {
      op.y[at + j] = store<T>(load(kept[j]) * r * load(op.weight[j]));
    }
  }
}

template <class T, int V, int Items>
struct BackwardRow {
  Pack<T, V> dy[Items], x[Items], residual[Items];

  __device__ void fetch(const Backward<T>& op, int64_t row) {
    const int64_t at = row * op.hidden;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
      if (j >= op.hidden) continue;
      dy[item] = load_vec<V>(op.dy + at + j);
      x[item] = load_vec<V>(op.x + at + j);
      if (op.residual != nullptr) residual[item] = load_vec<V>(op.residual + at + j);
    }
  }
};

template <class T, int V, int Items, int MaxThreads>
__global__ void __launch_bounds__(MaxThreads, Items == 1 ? 2 : 1) backward_kernel(Backward<T> op) {
  using A = acc_t<T>;
  constexpr bool kPrefetch = MaxThreads <= 512;  // 1,024 threads have no registers for a second row
  __shared__ A scratch[2][32];
  Pack<T, V> weight[Items];
  A part[Items][V] = {};
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
    if (j < op.hidden) weight[item] = load_vec<V>(op.weight + j);
  }
  BackwardRow<T, V, Items> row_data;
  if (kPrefetch) row_data.fetch(op, blockIdx.x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < op.num_rows; row += gridDim.x, turn ^= 1) {
    if (!kPrefetch) row_data.fetch(op, row);
    const BackwardRow<T, V, Items> now = row_data;
    // The next row is on its way while this one waits at the barrier.
    if (kPrefetch && row + gridDim.x < op.num_rows) row_data.fetch(op, row + gridDim.x);
    const A r = op.inv_rms[row];
    A dot = 0;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
      if (j >= op.hidden) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const A dy = load(now.dy[item].v[i]), x = load(now.x[item].v[i]);
        dot += dy * load(weight[item].v[i]) * x;
        part[item][i] += dy * (x * r);
      }
    }
    const A c = r * r * (block_sum(dot, scratch[turn]) / static_cast<A>(op.hidden));
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
      if (j >= op.hidden) continue;
      Pack<T, V> dx;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const A own = r * (load(now.dy[item].v[i]) * load(weight[item].v[i]) - load(now.x[item].v[i]) * c);
        dx.v[i] = store<T>(op.residual != nullptr ? load(now.residual[item].v[i]) + own : own);
      }
      store_vec(op.dx + row * op.hidden + j, dx);
    }
  }
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    const int64_t j = (static_cast<int64_t>(item) * blockDim.x + threadIdx.x) * V;
    if (j >= op.hidden) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) op.partial[blockIdx.x * op.hidden + j + i] = part[item][i];
  }
}

template <class T>
__global__ void __launch_bounds__(kScalarThreads) backward_scalar_kernel(Backward<T> op) {
  using A = acc_t<T>;
  __shared__ A scratch[2][32];
  A* partial = op.partial + blockIdx.x * op.hidden;
  for (int64_t j = threadIdx.x; j < op.hidden; j += kScalarThreads) partial[j] = 0;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < op.num_rows; row += gridDim.x, turn ^= 1) {
    const int64_t at = row * op.hidden;
    const A r = op.inv_rms[row];
    A dot = 0;
    for (int64_t j = threadIdx.x; j < op.hidden; j += kScalarThreads) {
      const A dy = load(op.dy[at + j]), x = load(op.x[at + j]);
      dot += dy * load(op.weight[j]) * x;
      partial[j] += dy * (x * r);
    }
    const A c = r * r * (block_sum(dot, scratch[turn]) / static_cast<A>(op.hidden));
    for (int64_t j = threadIdx.x; j < op.hidden; j += kScalarThreads) {
      const A own = r * (load(op.dy[at + j]) * load(op.weight[j]) - load(op.x[at + j]) * c);
      op.dx[at + j] = store<T>(op.residual != nullptr ? load(op.residual[at + j]) + own : own);
    }
  }
}

/// dweight[j] += sum over rows of partial[row, j]. A block takes 32 columns; thread row y adds rows y, y + 16, ...
template <class A>
__global__ void __launch_bounds__(512) sum_rows_kernel(int64_t num_rows, int64_t hidden, const A* partial, A* dweight) {
  __shared__ A sums[16][33];
  const int64_t j = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  A sum = 0;
  if (j < hidden) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < num_rows; row += 16) sum += partial[row * hidden + j];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || j >= hidden) return;
  for (int y = 1; y < 16; ++y) sum += sums[y][threadIdx.x];
  dweight[j] += sum;
}

int threads_for(int64_t packs) { return static_cast<int>(ceil_div(packs, 32) * 32); }

int64_t blocks_for(int64_t rows) { return rows < kMaxBlocks ? rows : kMaxBlocks; }

template <class T>
void launch_backward(const Backward<T>& op, bool packed, int64_t blocks, cudaStream_t stream) {
  constexpr int V = kVec<T>;
  const int64_t packs = ceil_div(op.hidden, V);
  const unsigned grid = static_cast<unsigned>(blocks);
  if (packed && packs <= 512) {
    backward_kernel<T, V, 1, 512><<<grid, threads_for(packs), 0, stream>>>(op);
  } else if (packed && packs <= 1024) {
    backward_kernel<T, V, 2, 512><<<grid, threads_for(ceil_div(packs, 2)), 0, stream>>>(op);
  } else if (packed && packs <= 2048) {
    backward_kernel<T, V, 2, 1024><<<grid, threads_for(ceil_div(packs, 2)), 0, stream>>>(op);
  } else {
    backward_scalar_kernel<T><<<grid, kScalarThreads, 0, stream>>>(op);
  }
}

}  // namespace

Status rms_norm_forward(void* queue_stream, const RmsNormForward& args) {
  const cudaStream_t stream = stream_of(queue_stream);
  return with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int V = kVec<T>;
    const Forward<T> op{args.num_rows,
                        args.hidden,
                        static_cast<acc_t<T>>(args.eps),
                        static_cast<const T*>(args.x),
                        static_cast<const T*>(args.delta),
                        static_cast<const T*>(args.weight),
                        static_cast<T*>(args.sum),
                        static_cast<T*>(args.y),
                        static_cast<acc_t<T>*>(args.inv_rms)};
    const bool packed = op.hidden % V == 0 && aligned16(op.x, op.delta, op.weight, op.sum, op.y);
    const int64_t packs = ceil_div(op.hidden, V);
    const unsigned blocks = static_cast<unsigned>(blocks_for(op.num_rows));
    if (packed && packs <= 512) {
      forward_kernel<T, V, 1><<<blocks, threads_for(packs), 0, stream>>>(op);
    } else if (packed && packs <= 2048) {
      forward_kernel<T, V, 2><<<blocks, threads_for(ceil_div(packs, 2)), 0, stream>>>(op);
    } else {
      forward_scalar_kernel<T><<<blocks, kScalarThreads, 0, stream>>>(op);
    }
    return launched();
  });
}

Status rms_norm_backward(void* queue_stream, const RmsNormBackward& args) {
  const cudaStream_t stream = stream_of(queue_stream);
  int processors = 0;
  if (Status s = multiprocessors(&processors); !s) return s;
  const int64_t most = rms_norm_partial_rows(args.num_rows);
  const int64_t blocks = most < 2 * processors ? most : 2 * processors;
  return with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const Backward<T> op{args.num_rows,
                         args.hidden,
                         static_cast<const T*>(args.dy),
                         static_cast<const T*>(args.x),
                         static_cast<const T*>(args.weight),
                         static_cast<const A*>(args.inv_rms),
                         static_cast<const T*>(args.d_residual),
                         static_cast<T*>(args.dx),
                         static_cast<A*>(args.workspace)};
    const bool packed = op.hidden % kVec<T> == 0 && aligned16(op.dy, op.x, op.weight, op.residual, op.dx);
    launch_backward(op, packed, blocks, stream);
    if (Status s = launched(); !s) return s;
    sum_rows_kernel<A><<<static_cast<unsigned>(ceil_div(op.hidden, 32)), dim3(32, 16), 0, stream>>>(
        blocks, op.hidden, op.partial, static_cast<A*>(args.dweight));
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
