// Page copies and the segment sum of their gradients on the CPU.
#include "kernels/pages.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"
#include "kernels/dispatch_pages.h"

namespace oomb::kernels::cpu {

namespace {

/// A slot is 2 * Hkv blocks of P * D elements; block b < Hkv is K of head b, the rest V.
struct Blocks {
  explicit Blocks(const PageShape& shape)
      : per_slot(2 * shape.kv_heads), kv_heads(shape.kv_heads), elements(shape.page_tokens * shape.head_dim) {}
  int64_t per_slot, kv_heads, elements;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T, class S>
using wider_t = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<S, double>, double, float>;

/// Converts from the wide sum to an element; a double sum goes to bf16 through float.
template <class S, class Acc>
S narrow(Acc x) {
  return store<S>(static_cast<acc_t<S>>(x));
}

/// Sum of one block of a slot over its segment, a strip at a time so that the accumulators stay in L1.
template <class T, class S>
OOMB_CLONES void sum_block(const T* source, int64_t elements, int64_t source_stride, int64_t tile_jump,
                           int64_t pages_per_tile, const int32_t* sources, int64_t num_sources, bool first, S* out) {
  using Acc = wider_t<T, S>;
  constexpr int64_t kStrip = 512;
  Acc sum[kStrip];
  for (int64_t begin = 0; begin < elements; begin += kStrip) {
    const int64_t n = std::min(kStrip, elements - begin);
    for (int64_t e = 0; e < n; ++e) sum[e] = first ? Acc(0) : static_cast<Acc>(load(out[begin + e]));
    for (int64_t s = 0; s < num_sources; ++s) {
      const int64_t tile = sources[s] / pages_per_tile, j = sources[s] % pages_per_tile;
      const T* from = source + tile * tile_jump + j * source_stride + begin;
      for (int64_t e = 0; e < n; ++e) sum[e] += static_cast<Acc>(load(from[e]));
    }
    for (int64_t e = 0; e < n; ++e) out[begin + e] = narrow<S>(sum[e]);
  }
}

template <class T, class S>
Status scatter(const PageScatter& op) {
  const Blocks blocks(op.shape);
  const int64_t head_jump = op.pages_per_tile * blocks.elements;
  parallel_for(0, op.num_segments * blocks.per_slot, grain_for(blocks.elements), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t segment = task / blocks.per_slot, block = task % blocks.per_slot;
      const T* from = static_cast<const T*>(block < blocks.kv_heads ? op.dk : op.dv);
      const int64_t head = block % blocks.kv_heads;
      const int64_t first_source = op.segment_begin[segment];
      sum_block(from + head * head_jump, blocks.elements, blocks.elements, blocks.kv_heads * head_jump,
                op.pages_per_tile, op.sources + first_source, op.segment_begin[segment + 1] - first_source,
                op.first[segment] != 0, static_cast<S*>(op.slots[segment]) + block * blocks.elements);
    }
  });
  return kOk;
}

template <class T, class S>
Status gradient_read(const PageGradientRead& op) {
  using Acc = wider_t<T, S>;
  const Blocks blocks(op.shape);
  const int64_t head_dim = op.shape.head_dim, page_tokens = op.shape.page_tokens;
  const int64_t pages = ceil_div(op.num_tokens, page_tokens);
  parallel_for(0, pages * blocks.per_slot, grain_for(blocks.elements), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t page = task / blocks.per_slot, block = task % blocks.per_slot;
      if (op.slots[page] == nullptr) continue;
      const int64_t n = std::min(page_tokens, op.num_tokens - page * page_tokens) * head_dim;
      const S* from = static_cast<const S*>(op.slots[page]) + block * blocks.elements;
      T* to = static_cast<T*>(block < blocks.kv_heads ? op.dk : op.dv) +
              ((block % blocks.kv_heads) * op.num_tokens + page * page_tokens) * head_dim;
      for (int64_t e = 0; e < n; ++e) {
        to[e] = narrow<T>(static_cast<Acc>(load(to[e])) + static_cast<Acc>(load(from[e])));
      }
    }
  });
  return kOk;
}

}  // namespace

Status page_write(const PageWrite& op) {
  const Blocks blocks(op.shape);
  const int64_t size = size_of(op.dtype), head_dim = op.shape.head_dim, page_tokens = op.shape.page_tokens;
  const int64_t pages = ceil_div(op.num_tokens, page_tokens);
  parallel_for(0, pages * blocks.per_slot, grain_for(blocks.elements), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t page = task / blocks.per_slot, block = task % blocks.per_slot;
      const int64_t valid = std::min(page_tokens, op.num_tokens - page * page_tokens) * head_dim;
      const char* from = static_cast<const char*>(block < blocks.kv_heads ? op.k : op.v) +
                         ((block % blocks.kv_heads) * op.num_tokens + page * page_tokens) * head_dim * size;
      char* to = static_cast<char*>(op.slots[page]) + block * blocks.elements * size;
      std::memcpy(to, from, static_cast<size_t>(valid * size));
      std::memset(to + valid * size, 0, static_cast<size_t>((blocks.elements - valid) * size));
    }
  });
  return kOk;
}

Status page_gather(const PageGather& op) {
  const Blocks blocks(op.shape);
  const int64_t bytes = blocks.elements * size_of(op.dtype);
  const int64_t num_slots = op.num_tiles * op.pages_per_tile;
  parallel_for(0, num_slots * blocks.per_slot, grain_for(blocks.elements), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slot = task / blocks.per_slot, block = task % blocks.per_slot;
      const int64_t tile = slot / op.pages_per_tile, j = slot % op.pages_per_tile;
      const int64_t head = block % blocks.kv_heads;
      char* to = static_cast<char*>(block < blocks.kv_heads ? op.k : op.v) +
                 ((tile * blocks.kv_heads + head) * op.pages_per_tile + j) * bytes;
      std::memcpy(to, static_cast<const char*>(op.slots[slot]) + block * bytes, static_cast<size_t>(bytes));
    }
  });
  return kOk;
}

Status page_scatter(const PageScatter& op) {
  return with_type(op.dtype, [&](auto t) {
    return with_type(op.slot_dtype, [&](auto s) { return scatter<decltype(t), decltype(s)>(op); });
  });
}

Status page_gradient_read(const PageGradientRead& op) {
  return with_type(op.dtype, [&](auto t) {
    return with_type(op.slot_dtype, [&](auto s) { return gradient_read<decltype(t), decltype(s)>(op); });
  });
}

}  // namespace oomb::kernels::cpu
