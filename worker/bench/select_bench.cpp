#include "configs/error.h"
#include "kernels/page_select.h"
#include "worker/bench/chunk_rig.h"
#include "worker/bench/measurements.h"

namespace oomb::bench {

namespace {

using nlohmann::json;

// The two ops of a choice by themselves, with what they need.
class VoteOps {
 public:
  VoteOps(const Workbench& bench, const attention::SelectionInputs& in) : queue_(queue_of(in.q)) {
    const attention::SelectionRule& rule = bench.options.selection;
    votes_op_.kv_heads = in.q.size(0);
    votes_op_.num_tokens = in.q.size(1);
    votes_op_.group = in.q.size(2);
    votes_op_.head_dim = in.q.size(3);
    votes_op_.tile_tokens = rule.query_tile;
    votes_op_.num_pages = in.means.size(0);
    votes_op_.dtype = dtype_of(in.q);
    votes_op_.score_scale = rule.score_scale;
    votes_op_.q = in.q.data_ptr();
    votes_op_.means = in.means.data_ptr();
    const int64_t tiles = (votes_op_.num_tokens + rule.query_tile - 1) / rule.query_tile;
    votes_ = at::empty({tiles, votes_op_.num_pages}, bench.types.acc_options());
    votes_space_.emplace(kernels::page_votes_workspace_bytes(queue_, votes_op_), bench.types.device);
    votes_op_.votes = votes_.data_ptr();
    votes_op_.workspace = votes_space_->data();
    top_op_.num_rows = tiles;
    top_op_.num_pages = votes_op_.num_pages;
    top_op_.budget = rule.budget_pages;
    top_op_.sink = rule.sink_pages;
    top_op_.recent = rule.recent_pages;
    top_op_.acc = dtype_of(votes_);
    top_op_.votes = votes_.data_ptr();
    pages_ = at::empty({tiles, rule.budget_pages}, bench.types.index_options().dtype(at::kInt));
    top_space_.emplace(kernels::page_topk_workspace_bytes(queue_, top_op_), bench.types.device);
    top_op_.pages = pages_.data_ptr<int32_t>();
    top_op_.workspace = top_space_->data();
  }

  void votes() const { check(kernels::page_votes(queue_, votes_op_), "page_votes"); }
  void top_k() const { check(kernels::page_topk(queue_, top_op_), "page_topk"); }

 private:
  kernels::Queue queue_;
  kernels::PageVotes votes_op_;
  kernels::PageTopK top_op_;
  at::Tensor votes_, pages_;
  std::optional<Workspace> votes_space_, top_space_;
};

}  // namespace

json measure_selection(const Workbench& bench) {
  const attention::SelectionRule& rule = bench.options.selection;
  if (rule.dense || rule.budget_pages == 0) {
    throw InputError("bench select: this run selects nothing (attention.kind: dense, or budget_pages: 0); allowed: " +
                     std::string("attention.kind: topk with a budget"));
  }
  if (bench.past_pages() <= rule.budget_pages) {
    throw InputError("bench select: a sequence of " + std::to_string(bench.length) + " tokens has " +
                     std::to_string(bench.past_pages()) +
                     " past pages at its last chunk; allowed: lengths with more than attention.budget_pages (" +
                     std::to_string(rule.budget_pages) + ")");
  }
  const ChunkRig rig(bench, /*with_pages=*/false);
  const VoteOps ops(bench, rig.inputs);
  const auto e = static_cast<double>(c10::elementSize(bench.types.compute));
  const auto tokens = static_cast<double>(rig.tokens()), pages = static_cast<double>(rig.num_past_pages());
  const auto width = static_cast<double>(bench.model.num_kv_heads * bench.model.head_dim);
  const std::string shape =
      std::to_string(rig.tokens()) + " queries, " + std::to_string(rig.num_past_pages()) + " pages";
  json rows = json::array();
  rows.push_back(timed_row(bench, "page means of a chunk", shape,
                           {.bytes = e * width * tokens * (1.0 + 1.0 / static_cast<double>(rule.page_tokens))},
                           [&] { attention::page_means(rig.qkv.k, rule.page_tokens, {}, {}); }));
  // Two sweeps over token x page scores: the log-sum-exp, then the votes.
  rows.push_back(timed_row(bench, "votes", shape, {.flops = 4.0 * tokens * pages * width}, [&] { ops.votes(); }));
  rows.push_back(timed_row(bench, "top-k", shape, {}, [&] { ops.top_k(); }));
  rows.push_back(timed_row(bench, "selection as the pipeline calls it", shape, {},
                           [&] { attention::select_pages(rule, rig.inputs); }));
  return rows;
}

}  // namespace oomb::bench
