// The trainable tensors of a decoder, with their gradients and optimizer states.
//
// Projections that read the same input are stored as one matrix (q, k, v; gate, up), so each is one GEMM; their Hugging
// Face names are row ranges of it. A parameter has
//   weight  compute dtype, what the GEMMs read
//   grad    acc, the sum over chunks and sequences of one step
//   master  acc, what the optimizer updates; the same tensor as weight where the compute dtype is acc; undefined where
//           the optimizer updates a bf16 weight itself (StateFormat::stochastic_rounding)
//   m, v    acc, Adam's moments; or their 8-bit codes, with m_scale, v_scale [blocks] in fp32 (kernels/moment_code.h)
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "worker/model/hf_config.h"
#include "worker/tensor/glue.h"

namespace oomb::model {

/// Rows [row, row + rows) of a parameter under their Hugging Face name.
struct ParameterPart {
  std::string hf_name;
  int64_t row = 0, rows = 0;
};

enum class InitKind : uint8_t { normal, zeros, ones };

/// What a parameter keeps for its optimizer. Bytes per parameter of a bf16 model, weight and gradient included: 18 by
/// default, 8 + 1/32 with both.
struct StateFormat {
  bool int8_moments = false;         ///< not with acc f64
  bool stochastic_rounding = false;  ///< no master; compute dtype bf16
};

struct Parameter {
  std::string name;
  std::vector<ParameterPart> parts;
  InitKind init = InitKind::normal;
  bool decayed = true;  ///< weight decay applies: matrices yes, norms and biases no
  at::Tensor weight, grad, master, m, v, m_scale, v_scale;

  /// Where values come in: what all others are rounded from.
  at::Tensor& source() { return master.defined() ? master : weight; }
};

/// A fixed, platform-independent random stream per name.
uint64_t stream_seed(uint64_t seed, const std::string& name);

/// Views into the parameters of one layer (weights [out, in], biases [out]); undefined where the model has none.
struct LayerParameters {
  Parameter *input_norm = nullptr, *qkv = nullptr, *qkv_bias = nullptr, *output = nullptr, *post_norm = nullptr,
            *gate_up = nullptr, *down = nullptr;
};

class Parameters {
 public:
  /// Allocates weights (and for training: grads, masters, moments, all zero). Weights are zero until initialised or
  /// loaded. std::logic_error for a format that does not go with the types.
  Parameters(const ModelConfig& config, const TensorTypes& types, bool training, StateFormat format = {});
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  /// Normal(0, std) for matrices, 1 for norms, 0 for biases. Each parameter has its own random stream, keyed by (seed,
  /// name), so a layout change does not move the others' values. Drawn in acc and rounded, one parameter at a time.
  void initialise(uint64_t seed, double std);

  /// Calls `read(hf_name, destination)` for every part; destination is a view of the master, or of the weight where
  /// there is none. Afterwards the compute copies are refreshed.
  void load(const std::function<void(const std::string& hf_name, at::Tensor& destination)>& read);
  /// master -> weight, where they differ.
  void refresh_weights();
  void zero_gradients();

  std::vector<Parameter>& all() { return all_; }
  const std::vector<Parameter>& all() const { return all_; }
  const LayerParameters& layer(int64_t l) const { return layers_[static_cast<size_t>(l)]; }
  Parameter& embedding() const { return *embedding_; }
  Parameter& final_norm() const { return *final_norm_; }
  /// The LM head [V, H]: the embedding itself if tied.
  Parameter& head() const { return *head_; }
  const ModelConfig& config() const { return config_; }
  const TensorTypes& types() const { return types_; }
  StateFormat format() const { return format_; }
  int64_t num_elements() const;

 private:
  ModelConfig config_;
  TensorTypes types_;
  StateFormat format_;
  std::vector<Parameter> all_;
  std::vector<LayerParameters> layers_;
  Parameter *embedding_ = nullptr, *final_norm_ = nullptr, *head_ = nullptr;
};

}  // namespace oomb::model
