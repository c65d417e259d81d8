#include "worker/pipeline/activations.h"

#include "worker/sizes/model_sizes.h"

namespace oomb {

const char* name_of(KeptActivations level) {
  switch (level) {
    case KeptActivations::all:
      return "all";
    case KeptActivations::no_norms:
      return "all but norms";
    case KeptActivations::attention:
      return "layer inputs and attention outputs";
    case KeptActivations::input:
      return "layer inputs";
  }
  return "?";
}

namespace {

Activations setting_of(KeptActivations level) {
  switch (level) {
    case KeptActivations::all:
      return Activations::kAll;
    case KeptActivations::no_norms:
      return Activations::kNoNorms;
    case KeptActivations::attention:
      return Activations::kAttention;
    case KeptActivations::input:
      return Activations::kInput;
  }
  return Activations::kAuto;
}

}  // namespace

int64_t elements_per_token(const model::ModelConfig& config, KeptActivations level) {
  return sizes::elements_per_token(config, setting_of(level));
}

void LayerActivations::keep_only(KeptActivations level) {
  if (level == KeptActivations::all) return;
  norm1.reset();
  norm2.reset();
  if (level == KeptActivations::no_norms) return;
  qkv = {};
  x2.reset();
  gate_up.reset();
  if (level == KeptActivations::attention) return;
  attention = {};
}

}  // namespace oomb
