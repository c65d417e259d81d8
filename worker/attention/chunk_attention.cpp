#include "worker/attention/chunk_attention.h"

#include <algorithm>
#include <vector>

#include "kernels/lse_merge.h"
#include "worker/attention/key_set.h"
#include "worker/attention/page_gradients.h"
#include "worker/tensor/glue.h"
#include "worker/tensor/trace.h"

namespace oomb::attention {

namespace {

// A block of the (tile, page) grid of one chunk that is gathered and attended at once.
struct Block {
  int64_t tile = 0, num_tiles = 0, tile_tokens = 0;  // all tiles of a block have tile_tokens tokens
  int64_t page = 0, num_pages = 0;
};

// Bounds of one block. Gathered keys and values should stay in a CPU's cache, or a fraction of a GPU's memory; scores
// count only where the implementation stores them.
struct BlockLimits {
  int64_t gathered_bytes, scores;
};
BlockLimits limits_of(const at::Tensor& q) {
  const int64_t no_limit = int64_t{1} << 50;
  if (q.is_cuda()) return {int64_t{2} << 30, stores_scores(q) ? int64_t{1} << 28 : no_limit};
  return {int64_t{16} << 20, stores_scores(q) ? int64_t{1} << 21 : no_limit};
}

std::vector<Block> blocks_of(const ChunkQkv& qkv, const PastPages& past) {
  const Selection& selection = *past.selection;
  std::vector<Block> blocks;
  if (selection.pages_per_tile == 0) return blocks;
  const int64_t num_tokens = qkv.q.size(1), heads = qkv.q.size(0) * qkv.q.size(2);
  const BlockLimits limits = limits_of(qkv.q);
  const int64_t full_tiles = num_tokens / selection.tile_tokens;
  const int64_t scores_per_page = heads * std::min(selection.tile_tokens, num_tokens) * past.shape.page_tokens;
  const int64_t bytes_per_page = past.shape.slot_elements() * qkv.q.element_size();
  const int64_t tile_pages = std::max(std::min({limits.scores / scores_per_page, limits.gathered_bytes / bytes_per_page,
                                                past.source->max_pages_at_once()}),
                                      int64_t{1});
  const int64_t pages = std::min(tile_pages, selection.pages_per_tile);
  const int64_t tiles = std::max(tile_pages / pages, int64_t{1});
  for (int64_t page = 0; page < selection.pages_per_tile; page += pages) {
    const int64_t num_pages = std::min(pages, selection.pages_per_tile - page);
    for (int64_t tile = 0; tile < full_tiles; tile += tiles) {
      blocks.push_back({tile, std::min(tiles, full_tiles - tile), selection.tile_tokens, page, num_pages});
    }
    const int64_t rest = num_tokens - full_tiles * selection.tile_tokens;
    if (rest > 0) blocks.push_back({full_tiles, 1, rest, page, num_pages});
  }
  return blocks;
}

// Rows of a block's tokens, [tiles, Hkv, tokens * G, ...], as a view of x [Hkv, C, G, ...].
at::Tensor tile_rows(const at::Tensor& x, const Block& block, int64_t tile_tokens) {
  std::vector<int64_t> shape = {x.size(0), block.num_tiles, block.tile_tokens * x.size(2)};
  if (x.dim() == 4) shape.push_back(x.size(3));
  return x.narrow(1, block.tile * tile_tokens, block.num_tiles * block.tile_tokens).view(shape).transpose(0, 1);
}

struct Gathered {
  at::Tensor k, v;  // [tiles, Hkv, pages * P, D]
};

// Addresses of a block's pages, int64 [num_tiles * num_pages]: looked up on the device, so that the host need not wait
// for a selection before it enqueues what reads the pages.
at::Tensor slots_of(const PastPages& past, const Block& block) {
  if (past.selection->all_past) return past.home_addresses.narrow(0, block.page, block.num_pages);
  const at::Tensor pages = past.selection->pages_on(past.home_addresses.device());
  return past.home_addresses.index_select(
      0, pages.narrow(0, block.tile, block.num_tiles).narrow(1, block.page, block.num_pages).flatten());
}

Gathered gather(const PastPages& past, const Block& block, const at::Tensor& like) {
  const at::Tensor slots = slots_of(past, block);
  Gathered out;
  out.k =
      at::empty({block.num_tiles, past.shape.kv_heads, block.num_pages * past.shape.page_tokens, past.shape.head_dim},
                like.options());
  out.v = at::empty_like(out.k);
  kernels::PageGather op;
  op.shape = past.shape;
  op.num_tiles = block.num_tiles;
  op.pages_per_tile = block.num_pages;
  op.dtype = dtype_of(like);
  op.slots = static_cast<const void* const*>(slots.data_ptr());
  op.k = out.k.data_ptr();
  op.v = out.v.data_ptr();
  check(kernels::page_gather(queue_of(like), op), "page_gather");
  return out;
}

struct Segments {
  std::vector<int32_t> pages;  // distinct, ascending
  GradientPlaces places;
};

// Which places of a block's gradient belong to which page: a counting sort, stable in the tile.
Segments segments_of(const PastPages& past, const Block& block, int64_t past_pages) {
  std::vector<int64_t> next(static_cast<size_t>(past_pages) + 1, 0);
  const auto for_each_place = [&](auto&& f) {
    for (int64_t tile = 0; tile < block.num_tiles; ++tile) {
      for (int64_t j = 0; j < block.num_pages; ++j) {
        f(static_cast<size_t>(past.selection->page(block.tile + tile, block.page + j)), tile * block.num_pages + j);
      }
    }
  };
  for_each_place([&](size_t page, int64_t) { ++next[page + 1]; });
  Segments out;
  GradientPlaces& places = out.places;
  places.pages_per_tile = block.num_pages;
  places.begin.push_back(0);
  for (size_t page = 0; page + 1 < next.size(); ++page) {
    if (next[page + 1] > 0) {
      out.pages.push_back(static_cast<int32_t>(page));
      places.begin.push_back(places.begin.back() + next[page + 1]);
    }
    next[page + 1] += next[page];
  }
  places.sources.resize(static_cast<size_t>(places.begin.back()));
  for_each_place([&](size_t page, int64_t place) {
    places.sources[static_cast<size_t>(next[page]++)] = static_cast<int32_t>(place);
  });
  return out;
}

// Adds a block's dK, dV to the gradient slots of its pages, each page's contributions in ascending tile order.
void scatter(const PastPages& past, const Block& block, const PartialGradient& gradient) {
  const Segments segments = segments_of(past, block, past.home_addresses.size(0));
  const cluster::GradientSlots slots = past.source->gradient_slots(past.layer, past.chunk, segments.pages);
  add_to_slots(past.shape, gradient.dk.contiguous(), gradient.dv.contiguous(), segments.places, slots,
               past.gradient_dtype);
}

cluster::SelectedRange range_of(const PastPages& past, const Block& block) {
  return {past.selection, past.layer, past.chunk, block.tile, block.num_tiles, block.page, block.num_pages};
}

// Makes block i's pages readable while those of the next block are on their way.
void make_readable(const PastPages& past, const std::vector<Block>& blocks, size_t i) {
  past.source->make_readable(range_of(past, blocks[i]));
  if (i + 1 < blocks.size()) past.source->expect(range_of(past, blocks[i + 1]));
}

// (o, lse) := merge of (o, lse) and set b. `out` as lse_merge.h has it; lse is updated in place.
void merge(const at::Tensor& o, at::Tensor& lse, const at::Tensor& o_b, const at::Tensor& lse_b, at::Tensor& out,
           bool token_major) {
  kernels::LseMerge op;
  op.kv_heads = lse.size(0);
  op.num_tokens = lse.size(1);
  op.group = lse.size(2);
  op.head_dim = o.size(-1);
  op.a_dtype = dtype_of(o);
  op.out_dtype = dtype_of(out);
  op.acc = dtype_of(lse);
  op.o_a = o.data_ptr();
  op.lse_a = lse.data_ptr();
  if (o_b.defined()) {
    op.b_dtype = dtype_of(o_b);
    op.o_b = o_b.data_ptr();
    op.lse_b = lse_b.data_ptr();
  }
  op.out = out.data_ptr();
  op.token_major = token_major;
  op.lse = lse.data_ptr();
  check(kernels::lse_merge(queue_of(lse), op), "lse_merge");
}

int64_t pages_of(const ChunkQkv& qkv, const PastPages& past) {
  return (qkv.k.size(1) + past.shape.page_tokens - 1) / past.shape.page_tokens;
}

}  // namespace

AttentionOutput attention_forward(const ChunkQkv& qkv, const PastPages& past, double scale) {
  const TraceRange range("attention forward");
  const int64_t kv_heads = qkv.q.size(0), num_tokens = qkv.q.size(1), group = qkv.q.size(2), head_dim = qkv.q.size(3);
  const std::vector<Block> blocks = blocks_of(qkv, past);
  if (!blocks.empty()) past.source->expect(range_of(past, blocks.front()));
  PartialOutput own = attend_own_chunk(qkv.q, qkv.k, qkv.v, scale);
  AttentionOutput out;
  out.lse = own.lse;
  out.o = at::empty({num_tokens, kv_heads * group * head_dim}, qkv.q.options());

  at::Tensor o_past, lse_past;  // one page block of all tiles
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    make_readable(past, blocks, i);
    const Gathered keys = gather(past, block, qkv.q);
    const PartialOutput part = attend(tile_rows(qkv.q, block, past.selection->tile_tokens), keys.k, keys.v, scale);
    if (!o_past.defined()) {
      o_past = at::empty({kv_heads, num_tokens, group, head_dim}, part.o.options());
      lse_past = at::empty({kv_heads, num_tokens, group}, part.lse.options());
    }
    tile_rows(o_past, block, past.selection->tile_tokens).copy_(part.o);
    tile_rows(lse_past, block, past.selection->tile_tokens).copy_(part.lse);
    const bool page_block_complete = i + 1 == blocks.size() || blocks[i + 1].page != block.page;
    if (page_block_complete && i + 1 < blocks.size()) {
      // Further sets follow: the running merge stays in the accumulator type, so its error does not grow with their
      // number.
      at::Tensor running =
          own.o.scalar_type() == out.lse.scalar_type() ? own.o : at::empty(own.o.sizes(), out.lse.options());
      merge(own.o, out.lse, o_past, lse_past, running, /*token_major=*/false);
      own.o = running;
    }
  }
  merge(own.o, out.lse, o_past, lse_past, out.o, /*token_major=*/true);
  return out;
}

AttentionGradient attention_backward(const at::Tensor& d_o_rows, const ChunkQkv& qkv, const AttentionOutput& out,
                                     const PastPages& past, double scale) {
  const TraceRange range("attention backward");
  const int64_t kv_heads = qkv.q.size(0), group = qkv.q.size(2), head_dim = qkv.q.size(3);
  const at::Tensor d_o = heads_from_rows(d_o_rows, 0, kv_heads, group, head_dim, nullptr);
  const at::Tensor o = heads_from_rows(out.o, 0, kv_heads, group, head_dim, nullptr);
  const MergedRows rows = merged_rows(d_o, o, out.lse);
  const std::vector<Block> blocks = blocks_of(qkv, past);
  if (!blocks.empty()) past.source->expect(range_of(past, blocks.front()));
  const PartialGradient own = attend_own_chunk_backward(rows, qkv.q, qkv.k, qkv.v, scale);
  at::Tensor dq = own.dq;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    make_readable(past, blocks, i);
    const auto view = [&](const at::Tensor& x) { return tile_rows(x, block, past.selection->tile_tokens); };
    const Gathered keys = gather(past, block, qkv.q);
    const MergedRows tile = rows.map(view);
    const PartialGradient part = attend_backward(tile, view(qkv.q), keys.k, keys.v, scale);
    // Sums over key sets are kept in the accumulator type and rounded once.
    if (dq.scalar_type() != out.lse.scalar_type()) dq = dq.to(out.lse.scalar_type());
    view(dq).add_(part.dq);
    scatter(past, block, part);
  }
  return {dq.to(qkv.q.scalar_type()), own.dk.to(qkv.k.scalar_type()), own.dv.to(qkv.v.scalar_type())};
}

void write_pages(const ChunkQkv& qkv, const PastPages& past, int64_t first_page) {
  const at::Tensor slots =
      addresses_to_device(past.table->make_homes(past.layer, first_page, pages_of(qkv, past)), qkv.k.device());
  kernels::PageWrite op;
  op.shape = past.shape;
  op.num_tokens = qkv.k.size(1);
  op.dtype = dtype_of(qkv.k);
  op.k = qkv.k.data_ptr();
  op.v = qkv.v.data_ptr();
  op.slots = static_cast<void* const*>(slots.data_ptr());
  check(kernels::page_write(queue_of(qkv.k), op), "page_write");
  past.home_addresses.narrow(0, first_page, slots.numel()).copy_(slots);
}

void add_page_gradients(const PastPages& past, int64_t first_page, AttentionGradient& gradient) {
  std::vector<void*> addresses;
  const int64_t num_tokens = gradient.dk.size(1);
  bool any = false;
  for (int64_t page = 0; page * past.shape.page_tokens < num_tokens; ++page) {
    addresses.push_back(past.table->gradient(past.layer, first_page + page));
    any = any || addresses.back() != nullptr;
  }
  if (!any) return;
  const at::Tensor slots = addresses_to_device(addresses, gradient.dk.device());
  kernels::PageGradientRead op;
  op.shape = past.shape;
  op.num_tokens = num_tokens;
  op.dtype = dtype_of(gradient.dk);
  op.slot_dtype = dtype_of(past.gradient_dtype);
  op.slots = static_cast<const void* const*>(slots.data_ptr());
  op.dk = gradient.dk.data_ptr();
  op.dv = gradient.dv.data_ptr();
  check(kernels::page_gradient_read(queue_of(gradient.dk), op), "page_gradient_read");
}

}  // namespace oomb::attention
