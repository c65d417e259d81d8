#include "worker/pipeline/activations.h"

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

int64_t elements_per_token(const model::ModelConfig& c, KeptActivations level) {
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  switch (level) {
    case KeptActivations::all:
      return 4 * c.hidden_size + 2 * (q + kv) + 2 * c.intermediate_size;
    case KeptActivations::no_norms:
      return 2 * c.hidden_size + 2 * (q + kv) + 2 * c.intermediate_size;
    case KeptActivations::attention:
      return c.hidden_size + q;
    case KeptActivations::input:
      return c.hidden_size;
  }
  return 0;
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
