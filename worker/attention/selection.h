// Which past pages each query tile of a chunk attends to.
//
// The choice is a constant of the backward pass: it is made once, in the first forward of a chunk, kept in host memory,
// and replayed whenever the chunk is recomputed.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "worker/tensor/glue.h"

namespace oomb::attention {

enum class Votes : uint8_t {
  tile,           ///< the paper's rule: all tokens of a tile vote (a later token may sway the pages of an earlier one)
  previous_tile,  ///< strictly causal: tile t uses the votes of tile t-1 of its chunk, tile 0 takes the newest pages
  tokens_so_far,  ///< strictly causal, for evaluation: every token uses the votes of its tile up to itself
};

struct SelectionRule {
  bool dense = false;                        ///< attend to all past pages
  double score_scale = 1.0;                  ///< multiplies q . mean before the softmax
  int64_t page_tokens = 128;                 ///< P
  int64_t query_tile = 128;                  ///< T
  int64_t budget_pages = 64;                 ///< B; 0 = no past pages
  int64_t chunk_pages = 0;                   ///< M; 0 = one level
  int64_t sink_pages = 0, recent_pages = 0;  ///< forced, inside B
  Votes votes = Votes::tile;
};

/// The pages of one (chunk, layer). Tiles are `tile_tokens` tokens; all have the same number of pages.
struct Selection {
  int64_t tile_tokens = 0;
  int64_t num_tiles = 0;
  int64_t pages_per_tile = 0;
  bool all_past = false;  ///< every past page, one tile: the tensors are undefined
  at::Tensor pages;       ///< int32 [num_tiles, pages_per_tile], ascending in each tile, on the worker's device
  at::Tensor host;        ///< the same in (pinned) host memory, where it stays until pass 2; see keep_on_host

  /// Page j of tile t. Reads `host`: the stream that fills it must have come that far.
  int64_t page(int64_t tile, int64_t j) const {
    return all_past ? j : host.const_data_ptr<int32_t>()[tile * pages_per_tile + j];
  }
  /// Starts the copy of `pages` into `place` (int32, host, at least as large), without waiting for it.
  void keep_on_host(const at::Tensor& place);
  /// Drops the device's copy: with one per chunk and layer, device memory would grow with the length.
  void drop_device_copy() { pages.reset(); }
  /// `pages` or, where that was dropped, `host`, on `device`.
  at::Tensor pages_on(const at::Device& device) const;
};

/// Inputs of a choice for one chunk and layer.
struct SelectionInputs {
  at::Tensor q;          ///< [Hkv, C, G, D], post-RoPE
  at::Tensor means;      ///< [past pages, Hkv, D], without the rotated key bias
  at::Tensor bias_mean;  ///< acc [Hkv, D] or undefined: no key bias
  RopeTables page_rope;  ///< acc [past pages, D / 2]: of each page's first position; used with bias_mean
};

/// Past pages = rows of `means`. Dense while they are at most the budget.
Selection select_pages(const SelectionRule& rule, const SelectionInputs& inputs);

/// Means of a chunk's pages in the dtype of k [Hkv, C, D], without the rotated bias (bias acc [Hkv, D] or undefined).
at::Tensor page_means(const at::Tensor& k, int64_t page_tokens, const at::Tensor& bias, const RopeTables& rope);

}  // namespace oomb::attention
