// Forward: a copy of rows in units of 16 bytes, or of one element where rows are odd. Backward: a thread owns V columns
// of one segment and adds the segment's rows in their order.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/embedding.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kThreads = 128;

/// A block copies a tile of one row: blockIdx.x = row * tiles + tile.
template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(int64_t units_per_row, int64_t tiles, int64_t vocab,
                                                             const int64_t* ids, const Unit* table, Unit* y) {
  constexpr int kPerThread = 4;
  const int64_t row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
  const int64_t id = ids[row];
  const bool valid = id >= 0 && id < vocab;
  const Unit* from = table + (valid ? id : 0) * units_per_row;
  Unit* to = y + row * units_per_row;
  Unit units[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t j = (tile * kPerThread + i) * kThreads + threadIdx.x;
    if (j < units_per_row) units[i] = from[j];
    if (!valid) memset(&units[i], 0xff, sizeof(Unit));  // NaN in every type: the host cannot look at ids
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t j = (tile * kPerThread + i) * kThreads + threadIdx.x;
    if (j < units_per_row) to[j] = units[i];
  }
}

template <class Unit>
Status copy_rows(const EmbeddingForward& op, cudaStream_t stream) {
  const int64_t units = op.hidden * size_of(op.dtype) / static_cast<int64_t>(sizeof(Unit));
  const int64_t tiles = ceil_div(units, 4 * kThreads);
  if (op.num_tokens > kMaxBlocks / tiles) return invalid("embedding_forward: too many elements for one grid");
  copy_rows_kernel<Unit><<<static_cast<unsigned>(op.num_tokens * tiles), kThreads, 0, stream>>>(
      units, tiles, op.vocab, op.ids, static_cast<const Unit*>(op.table), static_cast<Unit*>(op.y));
  return launched();
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    add_rows_kernel(int64_t hidden, int64_t tiles, int64_t vocab, const int64_t* ids, const int64_t* begin,
                    const int64_t* order, const T* dy, acc_t<T>* dtable) {
  using A = acc_t<T>;
  const int64_t segment = blockIdx.x / tiles, tile = blockIdx.x - segment * tiles;
  const int64_t j = (tile * kThreads + threadIdx.x) * V;
  const int64_t id = ids[segment];
  if (j >= hidden || id < 0 || id >= vocab) return;
  A sum[V] = {};
#pragma unroll 4
  for (int64_t i = begin[segment]; i < begin[segment + 1]; ++i) {
    const Pack<T, V> row = load_vec<V>(dy + order[i] * hidden + j);
#pragma unroll
    for (int k = 0; k < V; ++k) sum[k] += load(row.v[k]);
  }
  Pack<A, V> total = load_vec<V>(dtable + id * hidden + j);
#pragma unroll
  for (int k = 0; k < V; ++k) total.v[k] += sum[k];
  store_vec(dtable + id * hidden + j, total);
}

}  // namespace

Status embedding_forward(void* queue_stream, const EmbeddingForward& op) {
  const cudaStream_t stream = stream_of(queue_stream);
  const bool packed = op.hidden * size_of(op.dtype) % 16 == 0 &&
                      aligned16(static_cast<const char*>(op.table), static_cast<const char*>(op.y));
  if (packed) return copy_rows<uint4>(op, stream);
  switch (op.dtype) {
    case DType::f64:
      return copy_rows<uint64_t>(op, stream);
    case DType::f32:
      return copy_rows<uint32_t>(op, stream);
    case DType::bf16:
      return copy_rows<uint16_t>(op, stream);
  }
  return invalid("unknown element type");
}

Status embedding_backward(void* queue_stream, const EmbeddingBackward& op) {
  const cudaStream_t stream = stream_of(queue_stream);
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int V = kVec<T>;
    const T* dy = static_cast<const T*>(op.dy);
    acc_t<T>* dtable = static_cast<acc_t<T>*>(op.dtable);
    const bool packed = op.hidden % V == 0 && aligned16(dy, dtable);
    const int64_t tiles = ceil_div(op.hidden, static_cast<int64_t>(kThreads) * (packed ? V : 1));
    if (op.num_segments > kMaxBlocks / tiles) return invalid("embedding_backward: too many elements for one grid");
    const unsigned blocks = static_cast<unsigned>(op.num_segments * tiles);
    if (packed) {
      add_rows_kernel<T, V><<<blocks, kThreads, 0, stream>>>(op.hidden, tiles, op.vocab, op.segment_ids,
                                                             op.segment_begin, op.order, dy, dtable);
    } else {
      add_rows_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(op.hidden, tiles, op.vocab, op.segment_ids,
                                                             op.segment_begin, op.order, dy, dtable);
    }
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
