// Page copies and the segment sum of their gradients on CUDA. All of them are bound by memory: each thread moves 16
// bytes at a time with several accesses in flight where the addresses allow it, and single elements where not.
#include <type_traits>

#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/dispatch_pages.h"
#include "kernels/pages.h"

namespace oomb::kernels::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 8;                                         ///< accesses of a thread that are in flight together
constexpr int64_t kPieceBytes = int64_t{kThreads} * kUnroll * 16;  ///< of a (slot, head) block copied by a thread block

/// A slot is 2 * Hkv blocks of P * D elements; block b < Hkv is K of head b, the rest V.
struct Blocks {
  explicit Blocks(const PageShape& shape)
      : per_slot(2 * shape.kv_heads), kv_heads(shape.kv_heads), elements(shape.page_tokens * shape.head_dim) {}
  int64_t per_slot, kv_heads, elements;
};

template <class Unit>
__device__ void copy_units(char* to, const char* from, int64_t valid_bytes, int64_t begin, int64_t end) {
  constexpr int64_t kBytes = sizeof(Unit);
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  const int64_t valid = valid_bytes / kBytes, last = end / kBytes;
  for (int64_t base = begin / kBytes + threadIdx.x; base < last; base += int64_t{kThreads} * kUnroll) {
    Unit held[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = base + u * kThreads;
      held[u] = Unit{};
      if (at < valid && at < last) held[u] = source[at];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = base + u * kThreads;
      if (at < last) target[at] = held[u];
    }
  }
}

/// Bytes [begin, end) of a block: the first valid_bytes of it come from `from`, the rest is zero.
template <class Element>
__device__ void copy_piece(char* to, const char* from, int64_t valid_bytes, int64_t begin, int64_t end) {
  const uint64_t low = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                       static_cast<uint64_t>(valid_bytes) | static_cast<uint64_t>(end);
  if ((low & 15) == 0) {
    copy_units<uint4>(to, from, valid_bytes, begin, end);
  } else {
    copy_units<Element>(to, from, valid_bytes, begin, end);
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) write_kernel(PageWrite op, Blocks blocks, int64_t pieces) {
  const int64_t task = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const int64_t page = task / blocks.per_slot, block = task % blocks.per_slot;
  const int64_t size = sizeof(Element), token = page * op.shape.page_tokens;
  const int64_t left = op.num_tokens - token;
  const int64_t valid = (left < op.shape.page_tokens ? left : op.shape.page_tokens) * op.shape.head_dim * size;
  const char* from = static_cast<const char*>(block < blocks.kv_heads ? op.k : op.v) +
                     ((block % blocks.kv_heads) * op.num_tokens + token) * op.shape.head_dim * size;
  const int64_t bytes = blocks.elements * size, begin = piece * kPieceBytes;
  copy_piece<Element>(static_cast<char*>(op.slots[page]) + block * bytes, from, valid, begin,
                      begin + kPieceBytes < bytes ? begin + kPieceBytes : bytes);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) gather_kernel(PageGather op, Blocks blocks, int64_t pieces) {
  const int64_t task = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const int64_t slot = task / blocks.per_slot, block = task % blocks.per_slot;
  const int64_t tile = slot / op.pages_per_tile, j = slot % op.pages_per_tile;
  const int64_t bytes = blocks.elements * static_cast<int64_t>(sizeof(Element)), begin = piece * kPieceBytes;
  char* to = static_cast<char*>(block < blocks.kv_heads ? op.k : op.v) +
             ((tile * blocks.kv_heads + block % blocks.kv_heads) * op.pages_per_tile + j) * bytes;
  copy_piece<Element>(to, static_cast<const char*>(op.slots[slot]) + block * bytes, bytes, begin,
                      begin + kPieceBytes < bytes ? begin + kPieceBytes : bytes);
}

template <class T, class S>
using wider_t = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<S, double>, double, float>;

template <class S, class Acc>
__device__ S narrow(Acc x) {
  return store<S>(static_cast<acc_t<S>>(x));
}

/// V elements read as one access of at most 16 bytes each.
template <class T, int V>
__device__ Pack<T, V> load_pack(const T* from) {
  if constexpr (sizeof(T) * V <= 16) {
    return *reinterpret_cast<const Pack<T, V>*>(from);
  } else {
    constexpr int kPart = 16 / static_cast<int>(sizeof(T));
    Pack<T, V> all;
#pragma unroll
    for (int p = 0; p < V / kPart; ++p) {
      const Pack<T, kPart> part = *reinterpret_cast<const Pack<T, kPart>*>(from + p * kPart);
#pragma unroll
      for (int e = 0; e < kPart; ++e) all.v[p * kPart + e] = part.v[e];
    }
    return all;
  }
}

template <class T, int V>
__device__ void store_pack(T* to, const Pack<T, V>& all) {
  if constexpr (sizeof(T) * V <= 16) {
    *reinterpret_cast<Pack<T, V>*>(to) = all;
  } else {
    constexpr int kPart = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int p = 0; p < V / kPart; ++p) {
      Pack<T, kPart> part;
#pragma unroll
      for (int e = 0; e < kPart; ++e) part.v[e] = all.v[p * kPart + e];
      *reinterpret_cast<Pack<T, kPart>*>(to + p * kPart) = part;
    }
  }
}

/// Adds `count` sources to V accumulators in their order, with the loads of four of them in flight.
template <class T, int V, class Acc, class At>
__device__ void add_sources(Acc (&sum)[V], int64_t count, const At& at) {
  constexpr int kFlight = 4;
  int64_t s = 0;
  for (; s + kFlight <= count; s += kFlight) {
    Pack<T, V> held[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) held[f] = load_pack<T, V>(at(s + f));
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += static_cast<Acc>(load(held[f].v[e]));
    }
  }
  for (; s < count; ++s) {
    const Pack<T, V> held = load_pack<T, V>(at(s));
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += static_cast<Acc>(load(held.v[e]));
  }
}

/// One thread owns V elements of a gradient slot.
template <class T, class S, int V>
__global__ void __launch_bounds__(kThreads) scatter_kernel(PageScatter op, Blocks blocks, int64_t pieces) {
  using Acc = wider_t<T, S>;
  const int64_t task = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const int64_t segment = task / blocks.per_slot, block = task % blocks.per_slot, head = block % blocks.kv_heads;
  const int64_t element = (piece * kThreads + threadIdx.x) * V;
  if (element >= blocks.elements) return;
  const int64_t first_source = op.segment_begin[segment];
  const int64_t count = op.segment_begin[segment + 1] - first_source;
  const int32_t* sources = op.sources + first_source;
  const T* from = static_cast<const T*>(block < blocks.kv_heads ? op.dk : op.dv) + element;
  const int pages_per_tile = static_cast<int>(op.pages_per_tile);
  const auto at = [&](int64_t s) {
    const int tile = sources[s] / pages_per_tile, j = sources[s] % pages_per_tile;
    return from + ((int64_t{tile} * blocks.kv_heads + head) * pages_per_tile + j) * blocks.elements;
  };
  S* slot = static_cast<S*>(op.slots[segment]) + block * blocks.elements + element;
  Acc sum[V] = {};
  if (op.first[segment] == 0) {
    const Pack<S, V> old = load_pack<S, V>(slot);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] = static_cast<Acc>(load(old.v[e]));
  }
  add_sources<T, V>(sum, count, at);
  Pack<S, V> out;
#pragma unroll
  for (int e = 0; e < V; ++e) out.v[e] = narrow<S>(sum[e]);
  store_pack<S, V>(slot, out);
}

template <class T, class S, int V>
__global__ void __launch_bounds__(kThreads) gradient_read_kernel(PageGradientRead op, Blocks blocks, int64_t pieces) {
  using Acc = wider_t<T, S>;
  const int64_t task = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const int64_t page = task / blocks.per_slot, block = task % blocks.per_slot;
  const S* slot = static_cast<const S*>(op.slots[page]);
  if (slot == nullptr) return;
  const int64_t token = page * op.shape.page_tokens, left = op.num_tokens - token;
  const int64_t valid = (left < op.shape.page_tokens ? left : op.shape.page_tokens) * op.shape.head_dim;
  const int64_t element = (piece * kThreads + threadIdx.x) * V;
  if (element >= valid) return;
  T* to = static_cast<T*>(block < blocks.kv_heads ? op.dk : op.dv) +
          ((block % blocks.kv_heads) * op.num_tokens + token) * op.shape.head_dim + element;
  const Pack<S, V> added = load_pack<S, V>(slot + block * blocks.elements + element);
  Pack<T, V> out = load_pack<T, V>(to);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    out.v[e] = narrow<T>(static_cast<Acc>(load(out.v[e])) + static_cast<Acc>(load(added.v[e])));
  }
  store_pack<T, V>(to, out);
}

/// Elements a thread owns in the vector path: 16 bytes of the narrower type.
template <class T, class S>
constexpr int kVector = kVec<T> > kVec<S> ? kVec<T> : kVec<S>;

/// May a thread take V elements at once? Slot addresses are in device memory, out of sight here: that gradient slots
/// are aligned to 16 bytes is part of the contract.
template <int V>
bool vectors_fit(const PageShape& shape, int64_t row_elements, const void* a, const void* b) {
  return shape.page_tokens * shape.head_dim % V == 0 && row_elements % V == 0 && aligned16(a, b);
}

Status grid_of(int64_t blocks) {
  return blocks <= kMaxBlocks ? kOk : invalid("page op: more work than one grid holds");
}

/// Calls fn(Element{}) with an unsigned integer of the element's size: copies do not look inside.
template <class Fn>
Status with_size(DType type, const Fn& fn) {
  switch (type) {
    case DType::f64:
      return fn(uint64_t{});
    case DType::f32:
      return fn(uint32_t{});
    case DType::bf16:
      return fn(uint16_t{});
  }
  return invalid("unknown element type");
}

template <class T, class S, int V>
Status launch_scatter(cudaStream_t stream, const PageScatter& op) {
  const Blocks blocks(op.shape);
  const int64_t pieces = ceil_div(blocks.elements, int64_t{kThreads} * V);
  const int64_t grid = op.num_segments * blocks.per_slot * pieces;
  if (const Status status = grid_of(grid); !status) return status;
  scatter_kernel<T, S, V><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(op, blocks, pieces);
  return launched();
}

template <class T, class S, int V>
Status launch_gradient_read(cudaStream_t stream, const PageGradientRead& op) {
  const Blocks blocks(op.shape);
  const int64_t pieces = ceil_div(blocks.elements, int64_t{kThreads} * V);
  const int64_t grid = ceil_div(op.num_tokens, op.shape.page_tokens) * blocks.per_slot * pieces;
  if (const Status status = grid_of(grid); !status) return status;
  gradient_read_kernel<T, S, V><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(op, blocks, pieces);
  return launched();
}

}  // namespace

Status page_write(void* stream, const PageWrite& op) {
  const Blocks blocks(op.shape);
  const int64_t pieces = ceil_div(blocks.elements * size_of(op.dtype), kPieceBytes);
  const int64_t grid = ceil_div(op.num_tokens, op.shape.page_tokens) * blocks.per_slot * pieces;
  if (const Status status = grid_of(grid); !status) return status;
  return with_size(op.dtype, [&](auto element) {
    write_kernel<decltype(element)>
        <<<static_cast<unsigned>(grid), kThreads, 0, stream_of(stream)>>>(op, blocks, pieces);
    return launched();
  });
}

Status page_gather(void* stream, const PageGather& op) {
  const Blocks blocks(op.shape);
  const int64_t pieces = ceil_div(blocks.elements * size_of(op.dtype), kPieceBytes);
  const int64_t grid = op.num_tiles * op.pages_per_tile * blocks.per_slot * pieces;
  if (const Status status = grid_of(grid); !status) return status;
  return with_size(op.dtype, [&](auto element) {
    gather_kernel<decltype(element)>
        <<<static_cast<unsigned>(grid), kThreads, 0, stream_of(stream)>>>(op, blocks, pieces);
    return launched();
  });
}

Status page_scatter(void* stream, const PageScatter& op) {
  return with_type(op.dtype, [&](auto t) {
    return with_type(op.slot_dtype, [&](auto s) {
      using T = decltype(t);
      using S = decltype(s);
      constexpr int V = kVector<T, S>;
      if (vectors_fit<V>(op.shape, 0, op.dk, op.dv)) return launch_scatter<T, S, V>(stream_of(stream), op);
      return launch_scatter<T, S, 1>(stream_of(stream), op);
    });
  });
}

Status page_gradient_read(void* stream, const PageGradientRead& op) {
  return with_type(op.dtype, [&](auto t) {
    return with_type(op.slot_dtype, [&](auto s) {
      using T = decltype(t);
      using S = decltype(s);
      constexpr int V = kVector<T, S>;
      if (vectors_fit<V>(op.shape, op.shape.head_dim, op.dk, op.dv)) {
        return launch_gradient_read<T, S, V>(stream_of(stream), op);
      }
      return launch_gradient_read<T, S, 1>(stream_of(stream), op);
    });
  });
}

}  // namespace oomb::kernels::cuda
