// One block per row and two sweeps: the first keeps a running maximum and sum per thread, the second, backwards, writes
// the gradient. Long rows get one block per multiprocessor, so that the rows in flight (40 MB of bf16 at 152,064
// logits) are still in the second-level cache when the second sweep reads them; backwards, because the end of the row
// is the most recent. Packs start at the row's first 16-byte border; up to V - 1 elements before and after are taken
// one by one.
#include "kernels/cross_entropy.h"
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kMaxThreads = 1024;

template <class T>
struct Args {
  int64_t num_rows, vocab, row_stride;
  double grad_scale;
  bool write_grad;
  T* logits;
  const int64_t* labels;
  acc_t<T>* loss;
};

template <class A>
__device__ A infinity() {
  return static_cast<A>(INFINITY);
}

/// exp(x - max). For bf16 logits the hardware's: its error, 2^-22 and 2^-24 of the difference, is far below theirs.
template <class T>
__device__ acc_t<T> exp_from(acc_t<T> x, acc_t<T> max) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x - max);
  } else {
    return exp(x - max);
  }
}

/// sum = sum of exp(x - max) over what was seen; nothing seen: max = -inf, sum = 0.
template <class A>
struct Running {
  A max = -infinity<A>();
  A sum = 0;

  template <class T, int V>
  __device__ void add(const Pack<T, V>& pack) {
    A top = load(pack.v[0]);
#pragma unroll
    for (int i = 1; i < V; ++i) top = fmax(top, static_cast<A>(load(pack.v[i])));
    if (top > max) {
      sum *= exp(max - top);
      max = top;
    }
    // Only -inf so far: nothing to add, and -inf - -inf would be NaN. (A NaN does not compare equal and gets through.)
    if (top == -infinity<A>() && max == -infinity<A>()) return;
#pragma unroll
    for (int i = 0; i < V; ++i) sum += exp_from<T>(load(pack.v[i]), max);
  }

  __device__ void merge(A other_max, A other_sum) {
    const A top = fmax(max, other_max);
    sum = sum * (max == top ? A{1} : exp(max - top)) + other_sum * (other_max == top ? A{1} : exp(other_max - top));
    max = top;
  }
};

template <class A>
__device__ Running<A> block_merge(Running<A> own) {
  __shared__ A maxima[kMaxThreads / 32], sums[kMaxThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const A max = __shfl_down_sync(0xffffffffu, own.max, offset);
    const A sum = __shfl_down_sync(0xffffffffu, own.sum, offset);
    own.merge(max, sum);
  }
  __syncthreads();  // the previous row's reads are done
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = own.max;
    sums[threadIdx.x / 32] = own.sum;
  }
  __syncthreads();
  Running<A> all{maxima[0], sums[0]};
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) all.merge(maxima[warp], sums[warp]);
  return all;
}

/// Elements before the first 16-byte border of a row, and packs after it.
template <class T>
struct Layout {
  int64_t head, packs;
  __device__ Layout(const T* x, int64_t n) {
    constexpr int V = kVec<T>;
    const int64_t off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) % 16) / static_cast<int64_t>(sizeof(T));
    head = off == 0 ? 0 : V - off;
    if (head > n) head = n;
    packs = (n - head) / V;
  }
};

template <class T>
__device__ Running<acc_t<T>> sweep(const T* x, int64_t n, const Layout<T>& layout) {
  constexpr int V = kVec<T>;
  Running<acc_t<T>> running;
  const T* body = x + layout.head;
#pragma unroll 4
  for (int64_t p = threadIdx.x; p < layout.packs; p += blockDim.x) running.add(load_vec<V>(body + p * V));
  if (threadIdx.x < layout.head) running.add(Pack<T, 1>{x[threadIdx.x]});
  const int64_t tail = layout.head + layout.packs * V + threadIdx.x;
  if (tail < n) running.add(Pack<T, 1>{x[tail]});
  return running;
}

/// x = factor * exp(x - max) for all elements but the label's, which becomes label_grad.
template <class T>
__device__ void write_gradient(T* x, int64_t n, const Layout<T>& layout, int64_t label, acc_t<T> max, acc_t<T> factor,
                               acc_t<T> label_grad) {
  constexpr int V = kVec<T>;
  const auto gradient = [&](T value, int64_t at) {
    return store<T>(at == label ? label_grad : factor * exp_from<T>(load(value), max));
  };
  T* body = x + layout.head;
  const int64_t rounds = ceil_div(layout.packs, blockDim.x);
#pragma unroll 2
  for (int64_t round = rounds - 1; round >= 0; --round) {
    const int64_t p = round * blockDim.x + threadIdx.x;
    if (p >= layout.packs) continue;
    Pack<T, V> pack = load_vec<V>(body + p * V);
#pragma unroll
    for (int i = 0; i < V; ++i) pack.v[i] = store<T>(factor * exp_from<T>(load(pack.v[i]), max));
    const int64_t label_in_pack = label - layout.head - p * V;
    if (label_in_pack >= 0 && label_in_pack < V) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i == label_in_pack) pack.v[i] = store<T>(label_grad);
      }
    }
    store_vec(body + p * V, pack);
  }
  if (threadIdx.x < layout.head) x[threadIdx.x] = gradient(x[threadIdx.x], threadIdx.x);
  const int64_t tail = layout.head + layout.packs * V + threadIdx.x;
  if (tail < n) x[tail] = gradient(x[tail], tail);
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) cross_entropy_kernel(Args<T> op) {
  using A = acc_t<T>;
  for (int64_t row = blockIdx.x; row < op.num_rows; row += gridDim.x) {
    T* x = op.logits + row * op.row_stride;
    const int64_t label = op.labels[row];
    if (label == kIgnoredLabel) {
      if (threadIdx.x == 0) op.loss[row] = 0;
      if (op.write_grad) {
        for (int64_t j = threadIdx.x; j < op.vocab; j += blockDim.x) x[j] = store<T>(A{0});
      }
      continue;
    }
    if (label < 0 || label >= op.vocab) {  // the host cannot look at labels; a NaN loss is seen by the step
      if (threadIdx.x == 0) op.loss[row] = static_cast<A>(NAN);
      continue;
    }
    const A target = load(x[label]);
    const Layout<T> layout(x, op.vocab);
    const Running<A> all = block_merge(sweep(x, op.vocab, layout));  // its barriers end all reads of the label's logit
    if (threadIdx.x == 0) op.loss[row] = log(all.sum) + (all.max - target);
    if (!op.write_grad) continue;
    const A scale = static_cast<A>(op.grad_scale);
    const A label_grad = scale * (exp(target - all.max) / all.sum - A{1});
    write_gradient(x, op.vocab, layout, label, all.max, scale / all.sum, label_grad);
  }
}

}  // namespace

Status cross_entropy(void* stream, const CrossEntropy& args) {
  int processors = 0;
  if (Status s = multiprocessors(&processors); !s) return s;
  return with_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Args<T> op{args.num_rows,   args.vocab,
                     args.row_stride, args.grad_scale,
                     args.write_grad, static_cast<T*>(args.logits),
                     args.labels,     static_cast<acc_t<T>*>(args.loss)};
    const int64_t packs = ceil_div(op.vocab, kVec<T>);
    const int threads = static_cast<int>(packs < kMaxThreads ? ceil_div(packs, 32) * 32 : kMaxThreads);
    const int64_t resident = static_cast<int64_t>(processors) * (kMaxThreads / threads);
    const int64_t blocks = op.num_rows < resident ? op.num_rows : resident;
    cross_entropy_kernel<T><<<static_cast<unsigned>(blocks), threads, 0, stream_of(stream)>>>(op);
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
