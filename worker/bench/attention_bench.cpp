#include <cmath>

#include "worker/attention/key_set.h"
#include "worker/bench/chunk_rig.h"
#include "worker/bench/measurements.h"
#include "worker/bench/statistics.h"

namespace oomb::bench {

namespace {

using nlohmann::json;

// Scores and weighted values are two products forward; backward has five (scores again, dV, dP, dQ, dK).
constexpr double kForward = 4.0, kBackward = 10.0;

// The backward pass reads the selection on the host.
attention::Selection choose(const Workbench& bench, const attention::SelectionInputs& inputs) {
  attention::Selection selection = attention::select_pages(bench.options.selection, inputs);
  if (selection.pages.defined()) {
    selection.keep_on_host(at::empty(selection.pages.sizes(),
                                     at::TensorOptions().dtype(at::kInt).pinned_memory(bench.types.device.is_cuda())));
    synchronise(bench.types.device);
  }
  return selection;
}

// Time and work of the past pages alone: what they add to the own chunk's.
json difference(const Workbench& bench, const std::string& op, const json& both, const json& own) {
  const double seconds =
      median(both["seconds"].get<std::vector<double>>()) - median(own["seconds"].get<std::vector<double>>());
  const double flops = both["flops"].get<double>() - own["flops"].get<double>();
  json row = {{"op", op}, {"shape", both["shape"]}, {"seconds", {seconds}}, {"flops", flops}};
  if (seconds > 0) {  // noise can be larger than what few pages cost
    row["flops_per_second"] = flops / seconds;
    row["share"] = flops / seconds / bench.ceilings.gemm_rate;
  }
  return row;
}

}  // namespace

json measure_attention(const Workbench& bench) {
  const model::ModelConfig& m = bench.model;
  ChunkRig rig(bench, /*with_pages=*/true);
  const attention::Selection selection = choose(bench, rig.inputs);
  const attention::PastPages past = rig.past(selection);
  const double scale = 1.0 / std::sqrt(static_cast<double>(m.head_dim));
  const int64_t tokens = rig.tokens(), pages = selection.pages_per_tile;
  const double per_key = static_cast<double>(m.num_heads) * static_cast<double>(m.head_dim);
  const double own_keys = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
  const double all_keys =
      own_keys + static_cast<double>(tokens) * static_cast<double>(pages * bench.options.selection.page_tokens);
  const std::string shape = std::to_string(tokens) + " queries, " + std::to_string(pages) + " of " +
                            std::to_string(rig.num_past_pages()) + " pages";

  const attention::AttentionOutput out = attention::attention_forward(rig.qkv, past, scale);
  const at::Tensor d_rows = at::randn_like(out.o);
  const int64_t group = m.num_heads / m.num_kv_heads;
  const at::Tensor d_o = heads_from_rows(d_rows, 0, m.num_kv_heads, group, m.head_dim, nullptr),
                   o = heads_from_rows(out.o, 0, m.num_kv_heads, group, m.head_dim, nullptr);
  const attention::MergedRows rows = attention::merged_rows(d_o, o, out.lse);
  const auto& [q, k, v] = rig.qkv;

  json result = json::array();
  result.push_back(timed_row(bench, "own chunk forward", shape, {.flops = kForward * per_key * own_keys},
                             [&] { attention::attend_own_chunk(q, k, v, scale); }));
  result.push_back(timed_row(bench, "own chunk backward", shape, {.flops = kBackward * per_key * own_keys},
                             [&] { attention::attend_own_chunk_backward(rows, q, k, v, scale); }));
  if (pages == 0) return result;
  result.push_back(timed_row(bench, "own chunk + past pages forward", shape, {.flops = kForward * per_key * all_keys},
                             [&] { attention::attention_forward(rig.qkv, past, scale); }));
  result.push_back(timed_row(bench, "own chunk + past pages backward", shape, {.flops = kBackward * per_key * all_keys},
                             [&] { attention::attention_backward(d_rows, rig.qkv, out, past, scale); }));
  result.push_back(difference(bench, "past pages forward (difference)", result[2], result[0]));
  result.push_back(difference(bench, "past pages backward (difference)", result[3], result[1]));
  return result;
}

}  // namespace oomb::bench
