// Bytes of a model's state, of one chunk's work and of a page, from the shape of the model and the settings of the run.
//
// No torch, no device: `oomb plan` counts with these functions before any worker exists. Letters as in the design: L
// layers, H hidden size, I intermediate size, Hq / Hkv query and key heads, D head dimension, C tokens of a chunk, P of
// a page, T of a query tile, V vocabulary.
#pragma once

#include <cstdint>

#include "configs/run_config.h"
#include "worker/model/hf_config.h"

namespace oomb::sizes {

/// Bytes of one element: of weights and activations, of sums and masters, of K/V homes, of page gradient slots.
struct ElementBytes {
  std::int64_t compute = 0, acc = 0, page = 0, page_gradient = 0;
};
ElementBytes element_bytes(const RunConfig& config);

/// What one worker keeps of a model for training. Weights and gradients are whole on every worker; masters and moments
/// are cut into `shards` of almost equal size, and this is the largest.
struct StateBytes {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;  // acc
  std::int64_t masters = 0;    // acc; 0 where the compute dtype is acc, and with stochastic rounding
  std::int64_t moments = 0;    // two of acc, or of 8 bits with an fp32 scale per 256 elements
};
StateBytes state_bytes(const model::ModelConfig& model, const RunConfig& config, std::int64_t shards);

/// Elements that a chunk keeps for its backward, per token and layer: all 4 H + 2 (Hq + Hkv) D + 2 I, no_norms 2 H
/// less, attention H + Hq D, input H. `level` is not auto.
std::int64_t elements_per_token(const model::ModelConfig& model, Activations level);

/// Bytes that one chunk keeps: those of all its tokens and layers, and H per token for the final stream. `level` is not
/// auto.
std::int64_t activation_bytes(const model::ModelConfig& model, const RunConfig& config, Activations level);

/// Pinned host bytes of a chunk whose layer inputs and attention outputs wait there: H + Hq D elements and Hq row
/// statistics of acc per token and layer, parts rounded up to 4,096; and the final stream.
std::int64_t host_activation_bytes(const model::ModelConfig& model, const RunConfig& config);

/// What a worker needs for the moment, beside kept activations.
struct WorkingBytes {
  std::int64_t layer = 0;     // temporaries of one layer, taken as twice what it could keep
  std::int64_t logits = 0;    // three fp32 tiles of loss.row_tile rows and V columns
  std::int64_t gathered = 0;  // keys and values of a block of tiles side by side, and their gradients
  std::int64_t slack = 0;     // allocator, libraries, the device's own context
  std::int64_t total() const { return layer + logits + gathered + slack; }
};
WorkingBytes working_bytes(const model::ModelConfig& model, const RunConfig& config, bool gpu);

/// Of one layer. A slot holds K and V of a page for all KV heads: 2 Hkv P D elements. FP8 homes have one fp32 scale per
/// head for each of K and V.
struct PageBytes {
  std::int64_t home = 0, gradient = 0;
  std::int64_t mean = 0;  // Hkv D elements of the compute dtype
};
PageBytes page_bytes(const model::ModelConfig& model, const RunConfig& config);

/// Host bytes of one (chunk, layer)'s selection: an int32 for each tile and retrieved page; none with dense attention.
std::int64_t selection_bytes(const RunConfig& config);

/// T: attention.query_tile, or the page where that is 0.
std::int64_t query_tile(const AttentionSection& attention);

}  // namespace oomb::sizes
