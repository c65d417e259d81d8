// One decoder layer on one chunk: forward in the parts that the pipeline schedules, and its own backward.
//
// The backward is written out rather than taken from autograd: weight gradients go straight into accumulators (one GEMM
// with beta = 1), nothing is kept that is not named here, the KV cache stays outside any graph, and a cluster can
// exchange page gradients in the middle of a layer.
#pragma once

#include <ATen/ATen.h>

#include "worker/model/parameters.h"
#include "worker/pipeline/activations.h"

namespace oomb {

class Layer {
 public:
  Layer(const model::ModelConfig& config, const model::LayerParameters& parameters)
      : config_(config), parameters_(parameters) {}

  /// Norm, projections and RoPE: fills x1, norm1, inv_rms1 and qkv. `delta` (may be undefined) is the MLP output of the
  /// layer before, still to be added to the stream x.
  void project(const at::Tensor& x, const at::Tensor& delta, const RopeTables& rope, LayerActivations& a) const;
  /// Everything after attention; returns the MLP's output (the next layer's delta). The stream is then a.x2.
  at::Tensor finish(LayerActivations& a) const;

  /// Compute again what `a` does not hold of project's outputs; with the same bits.
  void restore_projection(const RopeTables& rope, LayerActivations& a) const;
  /// The same for what finish_backward reads; a.attention must be there.
  void restore_finish(LayerActivations& a) const;

  /// d_out: gradient of (a.x2 + delta). Adds to the MLP's and the output projection's gradients. `d_attention` [C, Hq
  /// D] is the gradient of the attention output, `d_x2` of the residual stream there.
  struct FinishGradient {
    at::Tensor d_attention, d_x2;
  };
  FinishGradient finish_backward(const at::Tensor& d_out, const LayerActivations& a) const;
  /// Returns the gradient of (x + delta) at the layer's input. Adds to the projections' and the norm's gradients.
  at::Tensor project_backward(const attention::AttentionGradient& gradient, const at::Tensor& d_x2,
                              const RopeTables& rope, const LayerActivations& a) const;

 private:
  void project_heads(const RopeTables& rope, LayerActivations& a) const;

  const model::ModelConfig& config_;
  const model::LayerParameters& parameters_;
};

}  // namespace oomb
