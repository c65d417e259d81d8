// The chunk-recurrent pipeline over one sequence: pass 1 fills the KV pages, pass 2 goes through the chunks from last
// to first, recomputes each with its activations, and runs its backward.
//
//   pass 1   for chunk 0 .. S-2:  per layer  project -> pages, means -> select -> attend -> finish
//            (of the last layer only q, K, V and the selection)
//   pass 2   for chunk S-1 .. 0:  forward again with the stored selection, loss, then per layer from the top
//            finish^T -> attention^T (adds to past pages' gradient slots) -> own slots added to dK, dV -> project^T;
//            the chunk's pages and gradient slots are freed
//
// A worker of a group does this for the chunks it owns; what it needs of the others goes through a PageSource
// (worker/cluster/page_source.h). All numbers of chunks and pages and all positions are those of the whole sequence.
//
// The newest chunks keep (a part of) their activations from pass 1 and are not, or not wholly, computed again; the last
// one always does. With dense selection the gradients are those of full-sequence training.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "worker/attention/chunk_attention.h"
#include "worker/attention/selection.h"
#include "worker/cluster/page_source.h"
#include "worker/loss/head_loss.h"
#include "worker/model/parameters.h"
#include "worker/pages/page_table.h"
#include "worker/pipeline/chunk_grid.h"
#include "worker/pipeline/host_activations.h"
#include "worker/pipeline/layer.h"

namespace oomb {

/// Which chunks keep what between the passes. Distances count own chunks, from the worker's last one, which is 0.
struct ActivationPlan {
  KeptActivations recomputed = KeptActivations::all;  ///< what the forward of pass 2 keeps
  int64_t whole_chunks = 1;                           ///< newest chunks that keep as much from pass 1
  int64_t kept_chunks = 1;  ///< newest chunks that keep at least inputs and attention outputs from pass 1
  int64_t host_chunks = 0;  ///< that many chunks before those keep them in host memory (HostActivations)

  bool is_kept(int64_t distance) const { return distance < std::max({kept_chunks, whole_chunks, int64_t{1}}); }
  bool is_on_host(int64_t distance) const {
    return !is_kept(distance) && distance < std::max({kept_chunks, whole_chunks, int64_t{1}}) + host_chunks;
  }
  KeptActivations level_of(int64_t distance) const {
    const bool partly = is_kept(distance) && distance >= whole_chunks;
    return partly ? std::max(recomputed, KeptActivations::attention) : recomputed;
  }
};

struct PipelineOptions {
  int64_t chunk_tokens = 4096;
  attention::SelectionRule selection;
  at::ScalarType gradient_dtype = at::kFloat;  ///< of page gradient slots
  int64_t loss_row_tile = 1024;
  ActivationPlan activations;
  /// If set, gives the pages of every (chunk, layer) instead of a choice: the rule is discrete, so runs of different
  /// precision can be compared only on the same pages. On the worker's device.
  std::function<attention::Selection(int64_t chunk, int64_t layer)> replay;
};

/// Sums over the own chunks of one sequence. Loss is the sum over labels, not the mean.
struct SequenceLoss {
  double loss_sum = 0;
  int64_t num_labels = 0;
};

/// What of a sequence's work is where; for tests and traces.
struct PipelineObserver {
  std::function<void(int64_t chunk, int64_t layer, const attention::Selection&)> on_selection;
  /// Logits are formed only if this is set. [tokens of the chunk, V], in evaluation.
  std::function<void(int64_t chunk, const at::Tensor& logits)> on_logits;
  std::function<void(const char* pass, int64_t chunk)> on_phase;
};

/// Not thread-safe; one sequence at a time. Reads weights and adds to gradients of `parameters`, which must outlive it.
class SequencePipeline {
 public:
  /// `source` (null: a group of one) must outlive it as well.
  SequencePipeline(model::Parameters* parameters, const PipelineOptions& options, pages::PageMemory* memory,
                   cluster::PageSource* source = nullptr);

  /// Adds grad_scale * d(sum of losses)/dw to every gradient; in a group, the part of the own chunks: the sum over
  /// workers is whole. ids and labels have N entries, on every worker; labels are already shifted, -100 is ignored.
  /// Without a valid label nothing is computed.
  SequenceLoss train(std::span<const int64_t> ids, std::span<const int64_t> labels, double grad_scale);
  /// Loss only, one forward pass; selection is strictly causal (Votes::tokens_so_far) unless `as_trained`.
  SequenceLoss evaluate(std::span<const int64_t> ids, std::span<const int64_t> labels, bool as_trained = false);
  /// Callbacks of the sequences that follow; an empty observer ends them.
  void set_observer(PipelineObserver observer) { observer_ = std::move(observer); }

  /// Bytes of activations that one chunk keeps for its backward.
  static int64_t activation_bytes(const model::ModelConfig& config, const PipelineOptions& options,
                                  const TensorTypes& types, KeptActivations level);
  /// Layout of the pages that sequences of `num_tokens` need, for sizing a PageMemory.
  static pages::PageLayout page_layout(const model::ModelConfig& config, const PipelineOptions& options,
                                       const TensorTypes& types, int64_t num_tokens);

 private:
  struct Sequence;
  struct ChunkForward;
  /// fill: pass 1. fill_and_keep, fill_and_send: pass 1 of a chunk that keeps activations, on the device or in host
  /// memory. recompute: pass 2 of one that did not.
  enum class Pass : uint8_t { fill, fill_and_keep, fill_and_send, recompute, evaluate };

  Sequence begin_sequence(std::span<const int64_t> ids, std::span<const int64_t> labels, cluster::Work work) const;
  ChunkForward forward(Sequence& sequence, int64_t chunk, Pass pass) const;
  Pass first_pass_of(const Sequence& sequence, int64_t chunk) const;
  RopeTables chunk_rope(const ChunkGrid& grid, int64_t chunk) const;
  attention::PastPages past_pages(Sequence& sequence, int64_t chunk, int64_t layer) const;
  void backward(Sequence& sequence, int64_t chunk, ChunkForward& forward, const at::Tensor& d_hidden) const;
  attention::Selection choose(Sequence& sequence, int64_t chunk, int64_t layer, const attention::ChunkQkv& qkv) const;
  HeadLoss loss_of(const Sequence& sequence, int64_t chunk, const at::Tensor& hidden, double grad_scale,
                   bool gradients) const;
  void embedding_backward(const Sequence& sequence, int64_t chunk, const at::Tensor& d_x) const;
  void prepare_layer_constants();

  model::Parameters* parameters_;
  PipelineOptions options_;
  pages::PageMemory* memory_;
  cluster::LocalPages local_;  // the source unless one is given
  cluster::PageSource* source_;
  TensorTypes types_;
  at::Tensor inv_freq_;  // double [D / 2]
  std::vector<Layer> layers_;
  std::unique_ptr<HostActivations> host_activations_;
  std::vector<at::Tensor> key_bias_;       // acc [Hkv, D] per layer
  std::vector<at::Tensor> key_bias_mean_;  // acc [Hkv, D] per layer: mean of R(p) bias over p in [0, P)
  PipelineObserver observer_;
};

}  // namespace oomb
