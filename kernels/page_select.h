// Top-k page retrieval: page means, votes of query tokens, and the choice of pages per tile.
//
// A page's vector is the mean over its valid tokens of post-RoPE K, per KV head. Each query token votes, per KV head,
// with softmax over the candidate pages of score_scale * (sum of the group's queries) . mean; votes are summed over the
// tile's tokens and the KV heads. The budget's pages with most votes are kept. Source of the rule: OOMB (arXiv
// 2602.02108).
//
// Means are stored without the rotated key bias: models such as Qwen2.5 have key biases of norm 600-900, and bf16 means
// that carry it lose up to a quarter of the right pages. A page's bias part is R(first position) * bias_mean, where
// bias_mean = mean over p in [0, P) of R(p) * bias depends on the layer only, and is added in acc when scoring.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

/// Means of the pages of one chunk: mean_p(K[p] - R(p) * bias) over the valid tokens of each page.
struct PageMeans {
  int64_t num_tokens = 0, kv_heads = 0, page_tokens = 0, head_dim = 0;
  DType dtype = DType::f32;
  const void* k = nullptr;     ///< [Hkv, num_tokens, D], post-RoPE
  const void* bias = nullptr;  ///< acc [Hkv, D], pre-RoPE, or null
  const void* cos = nullptr;   ///< acc [num_tokens, D / 2], used with bias
  const void* sin = nullptr;
  void* means = nullptr;  ///< dtype [ceil(num_tokens / P), Hkv, D]
};
Status page_means(const Queue& queue, const PageMeans& op);

/// votes[t, n] = sum over tokens i of tile t and KV heads h of softmax_n(score_scale * Q[i, h] . mean[n, h]), with
/// Q[i, h] the sum of the group's G queries in acc. Token x page scores are never stored for the whole chunk: one sweep
/// keeps the running log-sum-exp, a second one adds the votes.
struct PageVotes {
  int64_t num_tokens = 0, kv_heads = 0, group = 1, head_dim = 0;
  int64_t tile_tokens = 0;   ///< T; ceil(num_tokens / T) tiles
  int64_t num_pages = 0;     ///< candidates, >= 1
  DType dtype = DType::f32;  ///< of q and means
  double score_scale = 1.0;
  const void* q = nullptr;          ///< [Hkv, num_tokens, G, D], post-RoPE
  const void* means = nullptr;      ///< [num_pages, Hkv, D]
  const void* bias_mean = nullptr;  ///< acc [Hkv, D] or null
  const void* page_cos = nullptr;   ///< acc [num_pages, D / 2]: R(first position of the page), used with bias_mean
  const void* page_sin = nullptr;
  void* votes = nullptr;      ///< acc [num_tiles, num_pages], overwritten
  void* workspace = nullptr;  ///< page_votes_workspace_bytes(...) bytes, 256-byte aligned
};
int64_t page_votes_workspace_bytes(const Queue& queue, const PageVotes& op);
Status page_votes(const Queue& queue, const PageVotes& op);

/// Chooses `budget` of the candidates for each row of votes: forced pages first (candidates [0, sink) and the last
/// `recent`, cut to the budget: sinks come first, and of the recent pages the newest stay), then by descending vote,
/// ties to the lower page. -0 equals 0, and a NaN vote is below all others. Output is ascending.
struct PageTopK {
  int64_t num_rows = 0, num_pages = 0;  ///< rows of votes, columns of votes
  int64_t budget = 0;                   ///< pages to choose, in [1, number of candidates]
  int64_t sink = 0, recent = 0;
  DType acc = DType::f32;               ///< of votes
  const void* votes = nullptr;          ///< [num_rows, num_pages]
  const int32_t* candidates = nullptr;  ///< [num_candidates] ascending page ids, or null: all pages
  int64_t num_candidates = 0;           ///< used with candidates
  int32_t* pages = nullptr;             ///< [num_rows, budget], ascending page ids
  void* workspace = nullptr;            ///< page_topk_workspace_bytes(...) bytes, 16-byte aligned
};
int64_t page_topk_workspace_bytes(const Queue& queue, const PageTopK& op);
Status page_topk(const Queue& queue, const PageTopK& op);

}  // namespace oomb::kernels
