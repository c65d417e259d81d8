#include "tests/worker/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "worker/tensor/segments.h"

namespace oomb::test {

namespace {

struct Shape {
  int64_t n, chunk, page, kv, group, dim;
};

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {  // x [N, heads, D]
  const int64_t half = x.size(2) / 2;
  const at::Tensor low = x.narrow(2, 0, half), high = x.narrow(2, half, half);
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  return at::cat({low * c - high * s, high * c + low * s}, 2);
}

at::Tensor normalise(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * at::rsqrt((x * x).mean(-1, true) + eps) * weight;
}

// The plain rule for one row of votes: forced pages, then most votes, ties to the lower page.
std::vector<int64_t> take(const std::vector<double>& votes, std::vector<int64_t> candidates, int64_t budget,
                          int64_t sink, int64_t recent) {
  const auto count = static_cast<int64_t>(candidates.size());
  std::vector<int64_t> chosen;
  std::vector<bool> taken(candidates.size(), false);
  const auto force = [&](int64_t i) {
    if (static_cast<int64_t>(chosen.size()) < budget && i >= 0 && i < count && !taken[i]) {
      taken[i] = true;
      chosen.push_back(candidates[i]);
    }
  };
  for (int64_t i = 0; i < sink; ++i) force(i);
  for (int64_t i = count - 1; i >= count - recent; --i) force(i);
  std::vector<int64_t> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return votes[candidates[a]] > votes[candidates[b]]; });
  for (const int64_t i : order) force(i);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Pages per tile of one chunk.
std::vector<std::vector<int64_t>> select(const attention::SelectionRule& rule, const Shape& s, const at::Tensor& q,
                                         const at::Tensor& k, int64_t begin, int64_t tokens) {
  const int64_t past = begin / s.page;
  const at::Tensor means = k.narrow(0, 0, past * s.page).view({past, s.page, s.kv, s.dim}).mean(1);
  const at::Tensor group_q = q.narrow(0, begin, tokens).view({tokens, s.kv, s.group, s.dim}).sum(2);
  // [tokens, kv, past]
  const at::Tensor scores = at::einsum("thd,phd->thp", {group_q, means}) * rule.score_scale;
  const at::Tensor token_votes = at::softmax(scores, -1).sum(1).contiguous();
  const int64_t num_tiles = (tokens + rule.query_tile - 1) / rule.query_tile;
  std::vector<std::vector<double>> votes(num_tiles, std::vector<double>(past, 0.0));
  std::vector<double> chunk_votes(past, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t p = 0; p < past; ++p) {
      const double vote = token_votes.data_ptr<double>()[t * past + p];
      votes[t / rule.query_tile][p] += vote;
    }
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int64_t p = 0; p < past; ++p) chunk_votes[p] += votes[tile][p];
  }
  std::vector<int64_t> all(past);
  std::iota(all.begin(), all.end(), 0);
  std::vector<int64_t> candidates = all;
  if (rule.chunk_pages > 0 && past > rule.chunk_pages) {
    candidates = take(chunk_votes, all, rule.chunk_pages, rule.sink_pages, rule.recent_pages);
  }
  std::vector<std::vector<int64_t>> tiles;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    if (rule.votes != attention::Votes::previous_tile) {
      tiles.push_back(take(votes[tile], candidates, rule.budget_pages, rule.sink_pages, rule.recent_pages));
    } else if (tile == 0) {
      tiles.emplace_back(all.end() - rule.budget_pages, all.end());
    } else {
      tiles.push_back(take(votes[tile - 1], candidates, rule.budget_pages, rule.sink_pages, rule.recent_pages));
    }
  }
  return tiles;
}

// allowed[i, j]: query i sees key j.
at::Tensor mask_of(const attention::SelectionRule& rule, const Shape& s, const at::Tensor& q, const at::Tensor& k,
                   std::vector<std::vector<std::vector<int64_t>>>& selections) {
  at::Tensor allowed = at::zeros({s.n, s.n}, at::kBool);
  bool* a = allowed.data_ptr<bool>();
  for (int64_t begin = 0; begin < s.n; begin += s.chunk) {
    const int64_t tokens = std::min(s.chunk, s.n - begin), past = begin / s.page;
    const bool all_past = rule.dense || (past <= rule.budget_pages && rule.budget_pages > 0);
    std::vector<std::vector<int64_t>> tiles;
    if (!all_past && rule.budget_pages > 0) tiles = select(rule, s, q, k, begin, tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      bool* row = a + (begin + t) * s.n;
      std::fill(row + begin, row + begin + t + 1, true);
      if (all_past) std::fill(row, row + begin, true);
      if (tiles.empty()) continue;
      for (const int64_t p : tiles[t / rule.query_tile]) std::fill(row + p * s.page, row + (p + 1) * s.page, true);
    }
    selections.push_back(std::move(tiles));
  }
  return allowed;
}

}  // namespace

OracleResult full_sequence_autograd(const model::Parameters& parameters, const PipelineOptions& options,
                                    const std::vector<int64_t>& ids, const std::vector<int64_t>& labels,
                                    double grad_scale) {
  const model::ModelConfig& c = parameters.config();
  std::map<std::string, at::Tensor> w;
  for (const model::Parameter& p : parameters.all()) {
    w[p.name] = p.weight.detach().cpu().to(at::kDouble).clone();
    w[p.name].set_requires_grad(true);
  }
  const auto n = static_cast<int64_t>(ids.size());
  const Shape s{
      n, options.chunk_tokens, options.selection.page_tokens, c.num_kv_heads, c.num_heads / c.num_kv_heads, c.head_dim};
  const at::Tensor id_tensor = at::tensor(ids, at::kLong), label_tensor = at::tensor(labels, at::kLong);
  const at::Tensor angles =
      at::outer(at::arange(n, at::kDouble), at::tensor(model::inverse_frequencies(c), at::kDouble));
  const at::Tensor cos = angles.cos(), sin = angles.sin();
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));

  OracleResult out;
  at::Tensor x = at::index_select(w["embedding"], 0, id_tensor);
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const auto p = [&](const char* name) { return w["layers." + std::to_string(l) + "." + name]; };
    const at::Tensor rows = at::matmul(normalise(x, p("input_norm"), c.rms_norm_eps), p("qkv").t()) + p("qkv_bias");
    const int64_t qc = c.num_heads * s.dim, kc = s.kv * s.dim;
    const at::Tensor q = rotate(rows.narrow(1, 0, qc).reshape({n, c.num_heads, s.dim}), cos, sin);
    const at::Tensor k = rotate(rows.narrow(1, qc, kc).reshape({n, s.kv, s.dim}), cos, sin);
    const at::Tensor v = rows.narrow(1, qc + kc, kc).reshape({n, s.kv, s.dim});
    std::vector<std::vector<std::vector<int64_t>>> selections;
    const at::Tensor allowed =
        mask_of(options.selection, s, q.detach().contiguous(), k.detach().contiguous(), selections);
    out.selections.push_back(std::move(selections));
    const at::Tensor kx = k.repeat_interleave(s.group, 1), vx = v.repeat_interleave(s.group, 1);
    const at::Tensor scores = at::einsum("ihd,jhd->hij", {q, kx}) * scale;
    const at::Tensor prob = at::softmax(scores.masked_fill(~allowed, -std::numeric_limits<double>::infinity()), -1);
    const at::Tensor o = at::einsum("hij,jhd->ihd", {prob, vx}).reshape({n, qc});
    x = x + at::matmul(o, p("output").t());
    const at::Tensor gate_up = at::matmul(normalise(x, p("post_norm"), c.rms_norm_eps), p("gate_up").t());
    const at::Tensor gate = gate_up.narrow(1, 0, c.intermediate_size),
                     up = gate_up.narrow(1, c.intermediate_size, c.intermediate_size);
    x = x + at::matmul(gate * at::sigmoid(gate) * up, p("down").t());
  }
  const at::Tensor head = c.tie_word_embeddings ? w["embedding"] : w["head"];
  const at::Tensor logits = at::matmul(normalise(x, w["final_norm"], c.rms_norm_eps), head.t());
  const at::Tensor valid = label_tensor >= 0;
  const at::Tensor picked = at::gather(logits, 1, label_tensor.clamp_min(0).unsqueeze(1)).squeeze(1);
  const at::Tensor loss = ((at::logsumexp(logits, {1}) - picked) * valid).sum();
  (loss * grad_scale).backward();
  out.loss_sum = loss.item<double>();
  out.logits = logits.detach();
  for (auto& [name, tensor] : w) out.grads[name] = tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor);
  return out;
}

void randomise(model::Parameters& parameters, uint64_t seed, double key_bias_norm) {
  // Wide models get smaller weights, so that activations and attention scores stay of order 1.
  parameters.initialise(seed, 0.8 / std::sqrt(static_cast<double>(parameters.config().hidden_size)));
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  const model::ModelConfig& c = parameters.config();
  for (model::Parameter& p : parameters.all()) {
    if (p.init == model::InitKind::normal) continue;
    at::Tensor& target = p.source();
    for (int64_t i = 0; i < target.numel(); ++i)
      target[i] = (p.init == model::InitKind::ones ? 1.0 : 0.0) + 0.3 * normal(rng);
    if (key_bias_norm > 0 && p.name.ends_with("qkv_bias")) {
      at::Tensor keys = target.narrow(0, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim);
      keys.mul_(key_bias_norm / keys.norm().item<double>());
    }
  }
  parameters.refresh_weights();
}

std::vector<int64_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t& id : ids) id = static_cast<int64_t>(rng() % static_cast<uint64_t>(vocab));
  return ids;
}

std::vector<int64_t> shifted_labels(const std::vector<int64_t>& ids, bool with_holes) {
  std::vector<int64_t> labels(ids.begin() + 1, ids.end());
  labels.push_back(-100);
  for (size_t i = 0; with_holes && i < labels.size(); i += 7) labels[i] = -100;
  return labels;
}

model::ModelConfig small_config(int64_t num_heads, int64_t num_kv_heads, bool tied, int64_t layers) {
  model::ModelConfig c;
  c.hidden_size = 10;
  c.intermediate_size = 14;
  c.num_layers = layers;
  c.num_heads = num_heads;
  c.num_kv_heads = num_kv_heads;
  c.head_dim = 6;
  c.vocab_size = 13;
  c.rope_theta = 100.0;
  c.rms_norm_eps = 1e-5;
  c.tie_word_embeddings = tied;
  return c;
}

namespace {
pages::PageMemory::Options memory_options(const at::Device& device, int64_t fast_bytes) {
  pages::PageMemory::Options options;
  options.fast_bytes = fast_bytes;
  options.host_bytes = int64_t{1} << 30;
  options.segment_bytes = 1 << 16;
  if (device.is_cuda()) {
    options.fast = tensor_segments(at::TensorOptions().device(device));
    options.host = tensor_segments(at::TensorOptions().pinned_memory(true));
  }
  return options;
}
}  // namespace

Rig::Rig(const model::ModelConfig& config, const PipelineOptions& options, const TensorTypes& types, int64_t num_tokens,
         uint64_t seed, int64_t fast_bytes, double key_bias_norm)
    : parameters(config, types, /*training=*/true),
      memory(SequencePipeline::page_layout(config, options, types, num_tokens),
             memory_options(types.device, fast_bytes)),
      pipeline(&parameters, options, &memory) {
  randomise(parameters, seed, key_bias_norm);
  parameters.zero_gradients();
}

}  // namespace oomb::test
