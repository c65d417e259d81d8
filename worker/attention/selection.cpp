#include "worker/attention/selection.h"

#include <algorithm>

#include "kernels/page_select.h"

namespace oomb::attention {

namespace {

at::Tensor votes_of(const SelectionRule& rule, const SelectionInputs& in, int64_t tile_tokens) {
  kernels::PageVotes op;
  op.kv_heads = in.q.size(0);
  op.num_tokens = in.q.size(1);
  op.group = in.q.size(2);
  op.head_dim = in.q.size(3);
  op.tile_tokens = tile_tokens;
  op.num_pages = in.means.size(0);
  op.dtype = dtype_of(in.q);
  op.score_scale = rule.score_scale;
  op.q = in.q.data_ptr();
  op.means = in.means.data_ptr();
  if (in.bias_mean.defined()) {
    op.bias_mean = in.bias_mean.data_ptr();
    op.page_cos = in.page_rope.cos.data_ptr();
    op.page_sin = in.page_rope.sin.data_ptr();
  }
  const auto queue = queue_of(in.q);
  const int64_t num_tiles = (op.num_tokens + tile_tokens - 1) / tile_tokens;
  const auto acc = in.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor votes = at::empty({num_tiles, op.num_pages}, in.q.options().dtype(acc));
  const Workspace workspace(kernels::page_votes_workspace_bytes(queue, op), votes.device());
  op.votes = votes.data_ptr();
  op.workspace = workspace.data();
  check(kernels::page_votes(queue, op), "page_votes");
  return votes;
}

// `budget` of the candidates (all pages if undefined) per row of votes, ascending: int32 [rows, budget].
at::Tensor top_pages(const SelectionRule& rule, const at::Tensor& votes, int64_t budget, const at::Tensor& candidates) {
  kernels::PageTopK op;
  op.num_rows = votes.size(0);
  op.num_pages = votes.size(1);
  op.budget = budget;
  op.sink = rule.sink_pages;
  op.recent = rule.recent_pages;
  op.acc = dtype_of(votes);
  op.votes = votes.data_ptr();
  if (candidates.defined()) {
    op.candidates = candidates.data_ptr<int32_t>();
    op.num_candidates = candidates.numel();
  }
  const auto queue = queue_of(votes);
  at::Tensor pages = at::empty({op.num_rows, budget}, votes.options().dtype(at::kInt));
  const Workspace workspace(kernels::page_topk_workspace_bytes(queue, op), votes.device());
  op.pages = pages.data_ptr<int32_t>();
  op.workspace = workspace.data();
  check(kernels::page_topk(queue, op), "page_topk");
  return pages;
}

// The M pages with most votes of the whole chunk, or undefined for one-level selection or few pages.
at::Tensor chunk_candidates(const SelectionRule& rule, const at::Tensor& votes_row_per_tile) {
  if (rule.chunk_pages == 0 || votes_row_per_tile.size(1) <= rule.chunk_pages) return {};
  return top_pages(rule, votes_row_per_tile.sum(0, /*keepdim=*/true), rule.chunk_pages, {}).flatten();
}

// Row i: votes of the tokens of i's tile up to and including i. [C, past pages]
at::Tensor votes_so_far(const at::Tensor& token_votes, int64_t tile_tokens) {
  at::Tensor sums = at::empty_like(token_votes);
  for (int64_t begin = 0; begin < token_votes.size(0); begin += tile_tokens) {
    const int64_t tokens = std::min(tile_tokens, token_votes.size(0) - begin);
    sums.narrow(0, begin, tokens).copy_(token_votes.narrow(0, begin, tokens).cumsum(0));
  }
  return sums;
}

Selection choose_per_tile(const SelectionRule& rule, const SelectionInputs& in) {
  Selection out;
  const at::Tensor votes = votes_of(rule, in, rule.query_tile);
  out.tile_tokens = rule.query_tile;
  out.num_tiles = votes.size(0);
  out.pages_per_tile = rule.budget_pages;
  out.pages = top_pages(rule, votes, rule.budget_pages, chunk_candidates(rule, votes));
  if (rule.votes == Votes::previous_tile) {
    // Rows move down by one tile; the first tile, which has no votes before it, takes the newest pages.
    const int64_t past = votes.size(1);
    const at::Tensor newest = at::arange(past - rule.budget_pages, past, out.pages.options()).unsqueeze(0);
    out.pages = at::cat({newest, out.pages.narrow(0, 0, out.num_tiles - 1)});
  }
  return out;
}

Selection choose_per_token(const SelectionRule& rule, const SelectionInputs& in) {
  Selection out;
  out.tile_tokens = 1;
  out.pages_per_tile = rule.budget_pages;
  const at::Tensor token_votes = votes_of(rule, in, /*tile_tokens=*/1);
  out.num_tiles = token_votes.size(0);
  const at::Tensor tile_votes = votes_so_far(token_votes, rule.query_tile);
  if (rule.chunk_pages == 0 || token_votes.size(1) <= rule.chunk_pages) {
    out.pages = top_pages(rule, tile_votes, rule.budget_pages, {});
    return out;
  }
  // Two levels: every token has candidates of its own, from the votes of its chunk so far.
  const at::Tensor candidates = top_pages(rule, token_votes.cumsum(0), rule.chunk_pages, {});
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < out.num_tiles; ++i) {
    rows.push_back(top_pages(rule, tile_votes.narrow(0, i, 1), rule.budget_pages, candidates.select(0, i)));
  }
  out.pages = at::cat(rows);
  return out;
}

}  // namespace

void Selection::keep_on_host(const at::Tensor& place) {
  host = place.flatten().narrow(0, 0, pages.numel()).view(pages.sizes());
  host.copy_(pages, /*non_blocking=*/true);
}

at::Tensor Selection::pages_on(const at::Device& device) const {
  return pages.defined() ? pages.to(device) : host.to(device, /*non_blocking=*/true);
}

Selection select_pages(const SelectionRule& rule, const SelectionInputs& inputs) {
  const int64_t past_pages = inputs.means.size(0);
  if (rule.dense || past_pages <= rule.budget_pages || rule.budget_pages == 0) {
    Selection out;
    out.tile_tokens = inputs.q.size(1);
    out.num_tiles = 1;
    out.pages_per_tile = rule.dense || rule.budget_pages > 0 ? past_pages : 0;
    out.all_past = true;
    return out;
  }
  return rule.votes == Votes::tokens_so_far ? choose_per_token(rule, inputs) : choose_per_tile(rule, inputs);
}

at::Tensor page_means(const at::Tensor& k, int64_t page_tokens, const at::Tensor& bias, const RopeTables& rope) {
  kernels::PageMeans op;
  op.kv_heads = k.size(0);
  op.num_tokens = k.size(1);
  op.head_dim = k.size(-1);
  op.page_tokens = page_tokens;
  op.dtype = dtype_of(k);
  op.k = k.data_ptr();
  if (bias.defined()) {
    op.bias = bias.data_ptr();
    op.cos = rope.cos.data_ptr();
    op.sin = rope.sin.data_ptr();
  }
  at::Tensor means =
      at::empty({(op.num_tokens + page_tokens - 1) / page_tokens, op.kv_heads, op.head_dim}, k.options());
  op.means = means.data_ptr();
  check(kernels::page_means(queue_of(k), op), "page_means");
  return means;
}

}  // namespace oomb::attention
