// Moving pages between the chunk's contiguous tensors and page slots.
//
// A K/V slot holds K then V of one (layer, page): [2][Hkv][P][D] elements of the page dtype. A gradient slot holds dK
// then dV in the same order. Slots are given by address, so a page may live in any memory the device can address; a
// gradient slot's address is a multiple of 16. A page slot is always whole: where the chunk ends inside the page, the
// tail of the slot is zero.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct PageShape {
  int64_t kv_heads = 0, page_tokens = 0, head_dim = 0;
  /// Elements of one slot.
  constexpr int64_t slot_elements() const { return 2 * kv_heads * page_tokens * head_dim; }
};

/// Chunk -> slots. Page i takes tokens [i * P, (i + 1) * P) of the chunk.
struct PageWrite {
  PageShape shape;
  int64_t num_tokens = 0;  ///< of the chunk; ceil(num_tokens / P) slots are written
  DType dtype = DType::f32;
  const void* k = nullptr;       ///< [Hkv, num_tokens, D]
  const void* v = nullptr;       ///< [Hkv, num_tokens, D]
  void* const* slots = nullptr;  ///< [ceil(num_tokens / P)], the array itself in device-addressable memory
};
Status page_write(const Queue& queue, const PageWrite& op);

/// Slots -> one contiguous batch of keys and values per tile: k_out[t, h, j * P + p, :] = slot(t, j).K[h, p, :].
struct PageGather {
  PageShape shape;
  int64_t num_tiles = 0, pages_per_tile = 0;
  DType dtype = DType::f32;
  const void* const* slots = nullptr;  ///< [num_tiles * pages_per_tile], none null
  void* k = nullptr;                   ///< [num_tiles, Hkv, pages_per_tile * P, D]
  void* v = nullptr;                   ///< as k
};
Status page_gather(const Queue& queue, const PageGather& op);

/// The transpose of PageGather, as a segment sum: the gradients that tiles computed for a page are added to its
/// gradient slot, in ascending order of their place in `sources`, in the accumulator type.
struct PageScatter {
  PageShape shape;
  int64_t num_segments = 0;  ///< distinct pages
  int64_t pages_per_tile = 0;
  DType dtype = DType::f32;       ///< of dk and dv
  DType slot_dtype = DType::f32;  ///< of the gradient slots: f64, f32 or bf16 (rounded to nearest even at each call)
  const void* dk = nullptr;       ///< [num_tiles, Hkv, pages_per_tile * P, D]
  const void* dv = nullptr;
  const int64_t* segment_begin = nullptr;  ///< [num_segments + 1], into sources
  const int32_t* sources = nullptr;        ///< [segment_begin[num_segments]], tile * pages_per_tile + j
  void* const* slots = nullptr;            ///< [num_segments]
  const uint8_t* first = nullptr;          ///< [num_segments]: 1 = the slot holds nothing yet and is overwritten
};
Status page_scatter(const Queue& queue, const PageScatter& op);

/// Gradient slots of a chunk's own pages are added to its dK, dV. A null slot got no contribution and adds nothing.
struct PageGradientRead {
  PageShape shape;
  int64_t num_tokens = 0;
  DType dtype = DType::f32;  ///< of dk and dv
  DType slot_dtype = DType::f32;
  const void* const* slots = nullptr;  ///< [ceil(num_tokens / P)]
  void* dk = nullptr;                  ///< [Hkv, num_tokens, D], added to in acc, then rounded to dtype
  void* dv = nullptr;
};
Status page_gradient_read(const Queue& queue, const PageGradientRead& op);

}  // namespace oomb::kernels
