// Attention of one chunk at one layer: selected past pages plus the chunk's own causal part, merged exactly.
//
// The `gathered` backend: the pages of each tile are gathered into a contiguous batch (tile x KV head, rows = T * G)
// and attended without a mask; the own chunk is causal. Work is cut into blocks so that gathered keys and scores stay
// bounded whatever the number of past pages is.
#pragma once

#include <ATen/ATen.h>

#include "kernels/pages.h"
#include "worker/attention/selection.h"
#include "worker/cluster/page_source.h"
#include "worker/pages/page_table.h"

namespace oomb::attention {

/// Post-RoPE projections of a chunk, compute dtype, contiguous.
struct ChunkQkv {
  at::Tensor q;     ///< [Hkv, C, G, D]
  at::Tensor k, v;  ///< [Hkv, C, 1, D]
};

/// The pages a chunk attends to. `selection->num_tiles * pages_per_tile` may be 0.
struct PastPages {
  const Selection* selection = nullptr;
  pages::PageTable* table = nullptr;      ///< of the own chunks' pages
  cluster::PageSource* source = nullptr;  ///< makes pages of other workers readable, takes their gradients
  at::Tensor home_addresses;  ///< int64 [pages] on the worker's device: where each page of this layer can be read
  int64_t layer = 0, chunk = 0;
  kernels::PageShape shape;
  at::ScalarType gradient_dtype = at::kFloat;  ///< of the gradient slots
};

struct AttentionOutput {
  at::Tensor o;    ///< [C, Hkv * G * D], compute dtype
  at::Tensor lse;  ///< acc [Hkv, C, G], of all keys together
};
AttentionOutput attention_forward(const ChunkQkv& qkv, const PastPages& past, double scale);

struct AttentionGradient {
  at::Tensor dq;      ///< [Hkv, C, G, D]
  at::Tensor dk, dv;  ///< [Hkv, C, 1, D]: of the chunk's own keys, from this chunk's queries only
};
/// Gradients for past pages are added to the slots that `past.source` gives, each page's in ascending tile order.
AttentionGradient attention_backward(const at::Tensor& d_o, const ChunkQkv& qkv, const AttentionOutput& out,
                                     const PastPages& past, double scale);

/// Writes a chunk's K and V into homes of pages [first_page, ...) of the layer, and their addresses into
/// home_addresses.
void write_pages(const ChunkQkv& qkv, const PastPages& past, int64_t first_page);
/// Adds what later chunks contributed to this chunk's own pages to dk and dv.
void add_page_gradients(const PastPages& past, int64_t first_page, AttentionGradient& gradient);

}  // namespace oomb::attention
