// What a chunk's forward keeps for its backward, layer by layer, and what is computed again from it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "worker/attention/chunk_attention.h"
#include "worker/model/hf_config.h"

namespace oomb {

/// From most memory to most work. SwiGLU's output is never kept. Per token and layer (H hidden, I intermediate size,
/// elements of the compute dtype), and what the backward computes again:
///   all        4 H + 2 (Hq + Hkv) D + 2 I   nothing
///   no_norms   2 H + 2 (Hq + Hkv) D + 2 I   both norms
///   attention  H + Hq D                     norms, the q/k/v, output and gate/up projections: no attention, no down
///   input      H                            the whole layer but its down projection
enum class KeptActivations : uint8_t { all, no_norms, attention, input };
inline constexpr KeptActivations kAllLevels[] = {KeptActivations::all, KeptActivations::no_norms,
                                                 KeptActivations::attention, KeptActivations::input};
const char* name_of(KeptActivations level);
/// Elements per token and layer, as above.
int64_t elements_per_token(const model::ModelConfig& config, KeptActivations level);

/// The activations of one layer on one chunk; x1 and inv_rms are always there, others may be undefined until restored.
struct LayerActivations {
  at::Tensor x1, norm1, inv_rms1;  ///< residual stream before attention [C, H], its norm, acc [C]
  attention::ChunkQkv qkv;
  attention::AttentionOutput attention;
  at::Tensor x2, norm2, inv_rms2;  ///< residual stream before the MLP
  at::Tensor gate_up;              ///< [C, 2 I]

  /// Lets go of what `level` does not keep.
  void keep_only(KeptActivations level);
};

}  // namespace oomb
