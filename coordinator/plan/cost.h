// Seconds that the parts of a layer take on one chunk: flops over measured or assumed rates, plus element-wise bytes.
#pragma once

#include <cstdint>

#include "configs/run_config.h"
#include "coordinator/plan/resolve.h"
#include "worker/model/hf_config.h"

namespace oomb::plan {

/// One layer on one chunk; the parts are those that the schedule orders.
struct LayerCost {
  double project = 0;         // norm, q, k, v, RoPE
  double own = 0;             // attention within the chunk
  double select = 0;          // page scores and votes; pass 1 only
  double past = 0;            // attention to past pages
  double finish = 0;          // output projection, norm, MLP
  double down = 0;            // of that the down projection, which no backward needs again
  double finish_inputs = 0;   // backward: gradients of the MLP's and the output projection's inputs
  double finish_weights = 0;  // backward: their weight gradients, which may wait
  double own_backward = 0, past_backward = 0;
  double project_backward = 0;  // inputs and weights
  double forward() const { return project + own + past + finish; }
  double backward() const { return finish_inputs + finish_weights + own_backward + past_backward + project_backward; }
};

/// Flops: a linear layer of p parameters 2 p per token and product, of which there are one in the forward and two in
/// the backward; attention 4 Hq D per query and key forward, 2.5 times that backward, half of the keys within the
/// chunk; selection two sweeps of three products of 2 Hkv D per query and page (kernels/page_select.h). Element-wise
/// bytes of forward and backward: (8 H + 4 (Hq + Hkv) D + 3 I) and (12 H + 4 (Hq + Hkv) D + 6 I) elements per token,
/// from the reads and writes of the kernels. Checked against one H200 in tests/plan.
class CostModel {
 public:
  /// `slowdown` multiplies all times: 1, or what a calibration found.
  CostModel(const RunConfig& config, const model::ModelConfig& model, const Rates& rates, double slowdown = 1);

  LayerCost layer(std::int64_t tokens, std::int64_t past_pages) const;
  /// Head, loss and their backward.
  double head(std::int64_t tokens) const;
  /// AdamW over `parameters`.
  double optimizer(std::int64_t parameters) const;
  /// All of a chunk's work in one step, both passes, all layers; for balancing.
  double chunk(std::int64_t tokens, std::int64_t past_pages) const;

 private:
  const RunConfig& config_;
  const model::ModelConfig& model_;
  Rates rates_;
  double slowdown_;
};

/// Flops of a step that count for MFU, per token: 6 per parameter without the input embedding, and 6 Hq D L per key
/// attended (half of the keys forward and back for a causal square), `keys` in the mean over tokens.
double model_flops_per_token(const model::ModelConfig& model, double keys);

}  // namespace oomb::plan
