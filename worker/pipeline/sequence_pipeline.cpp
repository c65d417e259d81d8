#include "worker/pipeline/sequence_pipeline.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "worker/loss/head_loss.h"
#include "worker/tensor/trace.h"

namespace oomb {

namespace {

int64_t count_labels(std::span<const int64_t> labels) {
  return std::count_if(labels.begin(), labels.end(), [](int64_t label) { return label != kernels::kIgnoredLabel; });
}

}  // namespace

// Everything that belongs to one sequence while it is worked on.
struct SequencePipeline::Sequence {
  ChunkGrid grid;
  std::span<const int64_t> ids, labels;
  attention::SelectionRule rule;
  std::unique_ptr<pages::PageTable> table;
  std::vector<at::Tensor> means;                              // per layer, [pages, Hkv, D]
  RopeTables page_rope;                                       // of every page's first position
  at::Tensor home_addresses;                                  // int64 [layers, pages] on the device
  std::vector<int64_t> own;                                   // this worker's chunks, ascending
  std::vector<std::vector<attention::Selection>> selections;  // [own chunk][layer], empty until chosen
  at::Tensor selected;                                        // int32 [own chunks, layers, tiles, B] in host memory

  int64_t index_of(int64_t chunk) const { return std::lower_bound(own.begin(), own.end(), chunk) - own.begin(); }
  int64_t distance_of(int64_t chunk) const { return static_cast<int64_t>(own.size()) - 1 - index_of(chunk); }
  int64_t own_labels() const {
    int64_t sum = 0;
    for (const int64_t chunk : own) {
      sum += count_labels(
          labels.subspan(static_cast<size_t>(grid.begin_of(chunk)), static_cast<size_t>(grid.tokens_of(chunk))));
    }
    return sum;
  }
  attention::Selection& selection(int64_t chunk, int64_t layer) {
    return selections[static_cast<size_t>(index_of(chunk))][static_cast<size_t>(layer)];
  }
};

struct SequencePipeline::ChunkForward {
  RopeTables rope;
  std::vector<LayerActivations> layers;  // all of them, except after Pass::fill and Pass::evaluate
  at::Tensor x, hidden, inv_rms;         // final stream [C, H], its norm
};

SequencePipeline::SequencePipeline(model::Parameters* parameters, const PipelineOptions& options,
                                   pages::PageMemory* memory, cluster::PageSource* source)
    : parameters_(parameters),
      options_(options),
      memory_(memory),
      source_(source != nullptr ? source : &local_),
      types_(parameters->types()) {
  const model::ModelConfig& config = parameters->config();
  const std::vector<double> inv_freq = model::inverse_frequencies(config);
  inv_freq_ = at::empty({static_cast<int64_t>(inv_freq.size())}, at::kDouble);
  std::copy(inv_freq.begin(), inv_freq.end(), inv_freq_.data_ptr<double>());
  inv_freq_ = inv_freq_.to(types_.device);
  for (int64_t l = 0; l < config.num_layers; ++l) layers_.emplace_back(config, parameters->layer(l));
  if (options.activations.host_chunks > 0) {
    host_activations_ = std::make_unique<HostActivations>(config, types_.device, types_.compute, options.chunk_tokens);
  }
}

pages::PageLayout SequencePipeline::page_layout(const model::ModelConfig& config, const PipelineOptions& options,
                                                const TensorTypes& types, int64_t num_tokens) {
  const kernels::PageShape shape{config.num_kv_heads, options.selection.page_tokens, config.head_dim};
  pages::PageLayout layout;
  layout.num_layers = config.num_layers;
  layout.num_pages = ChunkGrid{num_tokens, options.chunk_tokens, options.selection.page_tokens}.num_pages();
  layout.kv_slot_bytes = shape.slot_elements() * static_cast<int64_t>(c10::elementSize(types.compute));
  layout.gradient_slot_bytes = shape.slot_elements() * static_cast<int64_t>(c10::elementSize(options.gradient_dtype));
  return layout;
}

int64_t SequencePipeline::activation_bytes(const model::ModelConfig& c, const PipelineOptions& options,
                                           const TensorTypes& types, KeptActivations level) {
  // Row statistics (lse, inverse rms) are small beside these; the final stream is one layer input more.
  const int64_t per_token = c.num_layers * elements_per_token(c, level) + c.hidden_size;
  return options.chunk_tokens * per_token * static_cast<int64_t>(c10::elementSize(types.compute));
}

// Weights change from step to step, so the key-bias terms of the page means are formed anew for each sequence.
void SequencePipeline::prepare_layer_constants() {
  key_bias_.clear();
  key_bias_mean_.clear();
  const model::ModelConfig& config = parameters_->config();
  const int64_t q_rows = config.num_heads * config.head_dim, kv = config.num_kv_heads, dim = config.head_dim;
  const RopeTables rope =
      rope_tables(at::arange(options_.selection.page_tokens, types_.index_options()), inv_freq_, types_.acc());
  const at::Tensor cos = rope.cos.mean(0), sin = rope.sin.mean(0);
  for (int64_t l = 0; l < config.num_layers; ++l) {
    const at::Tensor bias = parameters_->layer(l)
                                .qkv_bias->weight.narrow(0, q_rows, kv * dim)
                                .to(types_.acc())
                                .view({kv, dim})
                                .contiguous();
    const at::Tensor low = bias.narrow(1, 0, dim / 2), high = bias.narrow(1, dim / 2, dim / 2);
    key_bias_.push_back(bias);
    key_bias_mean_.push_back(at::cat({low * cos - high * sin, high * cos + low * sin}, 1));
  }
}

SequencePipeline::Sequence SequencePipeline::begin_sequence(std::span<const int64_t> ids,
                                                            std::span<const int64_t> labels, cluster::Work work) const {
  const model::ModelConfig& config = parameters_->config();
  if (ids.size() != labels.size() || ids.empty()) {
    throw std::logic_error("sequence of " + std::to_string(ids.size()) + " ids and " + std::to_string(labels.size()) +
                           " labels");
  }
  Sequence s;
  s.ids = ids;
  s.labels = labels;
  s.rule = options_.selection;
  s.grid = {static_cast<int64_t>(ids.size()), options_.chunk_tokens, options_.selection.page_tokens};
  s.table = std::make_unique<pages::PageTable>(page_layout(config, options_, types_, s.grid.num_tokens), memory_);
  s.home_addresses = at::empty({config.num_layers, s.grid.num_pages()}, types_.index_options());
  const bool may_select = !s.rule.dense && s.rule.budget_pages > 0 && s.grid.num_pages() > s.rule.budget_pages;
  for (int64_t l = 0; l < config.num_layers; ++l) {
    // Dense attention reads no means; the rows still count the past pages.
    s.means.push_back(at::empty({s.grid.num_pages(), may_select ? config.num_kv_heads : 0, config.head_dim},
                                types_.compute_options()));
  }
  source_->begin_sequence({s.grid, s.table.get(), s.home_addresses, s.means}, work);
  for (int64_t chunk = 0; chunk < s.grid.num_chunks(); ++chunk) {
    if (source_->owns(chunk)) s.own.push_back(chunk);
  }
  s.selections.resize(s.own.size(), std::vector<attention::Selection>(static_cast<size_t>(config.num_layers)));
  if (may_select) {
    const at::Tensor first_positions = at::arange(s.grid.num_pages(), types_.index_options()) * s.grid.page_tokens;
    s.page_rope = rope_tables(first_positions, inv_freq_, types_.acc());
    const int64_t tiles = (options_.chunk_tokens + s.rule.query_tile - 1) / s.rule.query_tile;
    s.selected = at::empty({static_cast<int64_t>(s.own.size()), config.num_layers, tiles, s.rule.budget_pages},
                           at::TensorOptions().dtype(at::kInt).pinned_memory(types_.device.is_cuda()));
  }
  return s;
}

attention::Selection SequencePipeline::choose(Sequence& s, int64_t chunk, int64_t layer,
                                              const attention::ChunkQkv& qkv) const {
  const int64_t past = s.grid.first_page_of(chunk);
  attention::SelectionInputs in;
  in.q = qkv.q;
  in.means = s.means[static_cast<size_t>(layer)].narrow(0, 0, past);
  in.bias_mean = key_bias_mean_[static_cast<size_t>(layer)];
  in.page_rope = s.page_rope;
  return attention::select_pages(s.rule, in);
}

RopeTables SequencePipeline::chunk_rope(const ChunkGrid& grid, int64_t chunk) const {
  const int64_t begin = grid.begin_of(chunk);
  return rope_tables(at::arange(begin, begin + grid.tokens_of(chunk), types_.index_options()), inv_freq_, types_.acc());
}

attention::PastPages SequencePipeline::past_pages(Sequence& s, int64_t chunk, int64_t layer) const {
  const model::ModelConfig& config = parameters_->config();
  return {&s.selection(chunk, layer),
          s.table.get(),
          source_,
          s.home_addresses[layer],
          layer,
          chunk,
          {config.num_kv_heads, s.grid.page_tokens, config.head_dim},
          options_.gradient_dtype};
}

SequencePipeline::ChunkForward SequencePipeline::forward(Sequence& s, int64_t chunk, Pass pass) const {
  const model::ModelConfig& config = parameters_->config();
  const int64_t begin = s.grid.begin_of(chunk), tokens = s.grid.tokens_of(chunk),
                first_page = s.grid.first_page_of(chunk);
  const bool is_last_chunk = chunk + 1 == s.grid.num_chunks();
  const double scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));

  ChunkForward f;
  f.rope = chunk_rope(s.grid, chunk);
  const at::Tensor ids =
      to_device(std::vector<int64_t>(s.ids.begin() + begin, s.ids.begin() + begin + tokens), types_.device);
  at::Tensor x = at::empty({tokens, config.hidden_size}, types_.compute_options()), delta;
  kernels::EmbeddingForward op;
  op.num_tokens = tokens;
  op.hidden = config.hidden_size;
  op.vocab = config.vocab_size;
  op.dtype = dtype_of(x);
  op.ids = ids.data_ptr<int64_t>();
  op.table = parameters_->embedding().weight.data_ptr();
  op.y = x.data_ptr();
  check(kernels::embedding_forward(queue_of(x), op), "embedding_forward");

  const bool keep = pass == Pass::fill_and_keep || pass == Pass::fill_and_send || pass == Pass::recompute;
  const KeptActivations level =
      pass == Pass::fill_and_send ? KeptActivations::attention : options_.activations.level_of(s.distance_of(chunk));
  for (int64_t l = 0; l < config.num_layers; ++l) {
    const TraceRange range("layer forward");
    LayerActivations a;
    layers_[static_cast<size_t>(l)].project(x, delta, f.rope, a);
    attention::Selection& selection = s.selection(chunk, l);
    const attention::PastPages past = past_pages(s, chunk, l);
    // In pass 2 the pages are there already; nobody reads those of a sequence's last chunk.
    if (pass != Pass::recompute && !is_last_chunk) {
      attention::write_pages(a.qkv, past, first_page);
      at::Tensor& means = s.means[static_cast<size_t>(l)];
      if (means.size(1) > 0) {
        means.narrow(0, first_page, s.grid.pages_of(chunk))
            .copy_(attention::page_means(a.qkv.k, s.grid.page_tokens, key_bias_[static_cast<size_t>(l)], f.rope));
      }
      source_->publish(l, chunk);
    }
    if (selection.num_tiles == 0) {
      source_->await_means(l, chunk);
      selection = options_.replay ? options_.replay(chunk, l) : choose(s, chunk, l, a.qkv);
      if (pass != Pass::evaluate && selection.pages.defined()) selection.keep_on_host(s.selected[s.index_of(chunk)][l]);
      if (observer_.on_selection) {
        synchronise(types_.device);
        observer_.on_selection(chunk, l, selection);
      }
    }
    if (pass == Pass::fill && l + 1 == config.num_layers) break;
    a.attention = attention::attention_forward(a.qkv, past, scale);
    selection.drop_device_copy();
    delta = layers_[static_cast<size_t>(l)].finish(a);
    x = a.x2;
    if (keep) {
      a.keep_only(level);
      if (pass == Pass::fill_and_send) host_activations_->store(s.index_of(chunk), l, a);
      f.layers.push_back(std::move(a));
    }
    if (pass == Pass::evaluate) {  // no backward will ask for it
      source_->finish(l, chunk);
      selection = {};
    }
  }
  if (pass == Pass::fill) return f;
  const NormOutput norm = rms_norm(x, delta, parameters_->final_norm().weight, config.rms_norm_eps);
  f.x = norm.sum;
  f.inv_rms = norm.inv_rms;
  if (pass == Pass::recompute || pass == Pass::evaluate) {
    f.hidden = norm.y;
  } else {
    f.rope = {};  // cheaper to form again than to keep
  }
  if (pass == Pass::fill_and_send) host_activations_->store_final(s.index_of(chunk), f.x);
  return f;
}

void SequencePipeline::backward(Sequence& s, int64_t chunk, ChunkForward& f, const at::Tensor& d_hidden) const {
  const model::ModelConfig& config = parameters_->config();
  const double scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  model::Parameter& final_norm = parameters_->final_norm();
  at::Tensor d_x = rms_norm_backward(d_hidden, f.x, final_norm.weight, f.inv_rms, {}, final_norm.grad);
  for (int64_t l = config.num_layers - 1; l >= 0; --l) {
    const Layer& layer = layers_[static_cast<size_t>(l)];
    LayerActivations& a = f.layers[static_cast<size_t>(l)];
    const TraceRange range("layer backward");
    const attention::PastPages past = past_pages(s, chunk, l);
    if (!a.x1.defined()) host_activations_->fetch(s.index_of(chunk), l, a);
    layer.restore_projection(f.rope, a);
    if (!a.attention.o.defined()) a.attention = attention::attention_forward(a.qkv, past, scale);
    layer.restore_finish(a);
    const Layer::FinishGradient upper = layer.finish_backward(d_x, a);
    attention::AttentionGradient gradient =
        attention::attention_backward(upper.d_attention, a.qkv, a.attention, past, scale);
    source_->finish(l, chunk);
    source_->complete(l, chunk);
    attention::add_page_gradients(past, s.grid.first_page_of(chunk), gradient);
    d_x = layer.project_backward(gradient, upper.d_x2, f.rope, a);
    a = {};
    s.table->release(l, s.grid.first_page_of(chunk), s.grid.pages_of(chunk));
  }
  embedding_backward(s, chunk, d_x);
}

void SequencePipeline::embedding_backward(const Sequence& s, int64_t chunk, const at::Tensor& d_x) const {
  const auto ids = s.ids.subspan(static_cast<size_t>(s.grid.begin_of(chunk)), static_cast<size_t>(d_x.size(0)));
  std::vector<int64_t> order(ids.size()), begin, segment_ids;
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t id = ids[static_cast<size_t>(order[i])];
    if (segment_ids.empty() || segment_ids.back() != id) {
      segment_ids.push_back(id);
      begin.push_back(static_cast<int64_t>(i));
    }
  }
  begin.push_back(static_cast<int64_t>(order.size()));
  const auto device = types_.device;
  const at::Tensor ids_d = to_device(segment_ids, device), begin_d = to_device(begin, device),
                   order_d = to_device(order, device);
  kernels::EmbeddingBackward op;
  op.num_segments = static_cast<int64_t>(segment_ids.size());
  op.hidden = d_x.size(1);
  op.vocab = parameters_->config().vocab_size;
  op.dtype = dtype_of(d_x);
  op.segment_ids = ids_d.data_ptr<int64_t>();
  op.segment_begin = begin_d.data_ptr<int64_t>();
  op.order = order_d.data_ptr<int64_t>();
  op.dy = d_x.data_ptr();
  op.dtable = parameters_->embedding().grad.data_ptr();
  check(kernels::embedding_backward(queue_of(d_x), op), "embedding_backward");
}

HeadLoss SequencePipeline::loss_of(const Sequence& s, int64_t chunk, const at::Tensor& hidden, double grad_scale,
                                   bool gradients) const {
  const auto begin = s.labels.begin() + s.grid.begin_of(chunk);
  const at::Tensor labels = to_device(std::vector<int64_t>(begin, begin + s.grid.tokens_of(chunk)), types_.device);
  return head_loss(hidden, labels, parameters_->head(), options_.loss_row_tile, grad_scale, gradients);
}

SequencePipeline::Pass SequencePipeline::first_pass_of(const Sequence& s, int64_t chunk) const {
  const int64_t distance = s.distance_of(chunk);
  if (options_.activations.is_kept(distance)) return Pass::fill_and_keep;
  const bool sent = options_.activations.is_on_host(distance) && host_activations_->reserve(s.index_of(chunk));
  return sent ? Pass::fill_and_send : Pass::fill;
}

SequenceLoss SequencePipeline::train(std::span<const int64_t> ids, std::span<const int64_t> labels, double grad_scale) {
  if (count_labels(labels) == 0) return {};
  prepare_layer_constants();
  Sequence s = begin_sequence(ids, labels, cluster::Work::training);
  const auto phase = [&](const char* pass, int64_t chunk) {
    if (observer_.on_phase) observer_.on_phase(pass, chunk);
  };
  std::vector<ChunkForward> first(s.own.size());  // of pass 1, where it kept something
  if (host_activations_) host_activations_->begin_sequence(static_cast<int64_t>(s.own.size()));
  for (const int64_t chunk : s.own) {
    phase("pass 1", chunk);
    const TraceRange range("pass 1: chunk");
    first[static_cast<size_t>(s.index_of(chunk))] = forward(s, chunk, first_pass_of(s, chunk));
  }
  synchronise(types_.device);  // pass 2 reads the selections on the host
  source_->begin_pass_2();
  at::Tensor loss_sum = at::zeros({}, types_.compute_options().dtype(at::kDouble));
  for (auto at = s.own.rbegin(); at != s.own.rend(); ++at) {
    const int64_t chunk = *at;
    phase("pass 2", chunk);
    const TraceRange range("pass 2: chunk");
    ChunkForward f = std::move(first[static_cast<size_t>(s.index_of(chunk))]);
    if (f.layers.empty()) {
      f = forward(s, chunk, Pass::recompute);
    } else {
      if (!f.x.defined()) f.x = host_activations_->fetch_final(s.index_of(chunk));
      f.rope = chunk_rope(s.grid, chunk);
      f.hidden = rms_norm(f.x, {}, parameters_->final_norm().weight, parameters_->config().rms_norm_eps).y;
    }
    const HeadLoss loss = loss_of(s, chunk, f.hidden, grad_scale, /*gradients=*/true);
    loss_sum += loss.loss_sum;
    backward(s, chunk, f, loss.d_hidden);
  }
  source_->end_sequence();
  return {loss_sum.item<double>(), s.own_labels()};
}

SequenceLoss SequencePipeline::evaluate(std::span<const int64_t> ids, std::span<const int64_t> labels,
                                        bool as_trained) {
  prepare_layer_constants();
  Sequence s = begin_sequence(ids, labels, cluster::Work::evaluation);
  if (!as_trained) s.rule.votes = attention::Votes::tokens_so_far;
  at::Tensor loss_sum = at::zeros({}, types_.compute_options().dtype(at::kDouble));
  for (const int64_t chunk : s.own) {
    if (observer_.on_phase) observer_.on_phase("evaluation", chunk);
    const ChunkForward f = forward(s, chunk, Pass::evaluate);
    if (observer_.on_logits) observer_.on_logits(chunk, linear_rows(f.hidden, parameters_->head().weight));
    loss_sum += loss_of(s, chunk, f.hidden, 1.0, /*gradients=*/false).loss_sum;
  }
  for (auto chunk = s.own.rbegin(); chunk != s.own.rend(); ++chunk) {
    for (int64_t l = parameters_->config().num_layers - 1; l >= 0; --l) source_->complete(l, *chunk);
  }
  source_->end_sequence();
  return {loss_sum.item<double>(), s.own_labels()};
}

}  // namespace oomb
