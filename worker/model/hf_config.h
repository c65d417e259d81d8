// The shape of a decoder, read from and written to a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oomb::model {

/// Decoder of the Qwen2 family: pre-norm RMSNorm, GQA with RoPE, SwiGLU, no other biases than those of q, k and v.
/// Weight shapes ([out, in], row-major): q [Hq·D, H], k and v [Hkv·D, H], o [H, Hq·D], gate and up [I, H], down [H, I],
/// embeddings and head [V, H].
struct ModelConfig {
  std::string architecture = "Qwen2ForCausalLM";
  std::string model_type = "qwen2";
  int64_t hidden_size = 0;        ///< H
  int64_t intermediate_size = 0;  ///< I
  int64_t num_layers = 0;         ///< L
  int64_t num_heads = 0;          ///< Hq
  int64_t num_kv_heads = 0;       ///< Hkv, divides Hq
  int64_t head_dim = 0;           ///< D, even; Hq·D need not equal H
  int64_t vocab_size = 0;         ///< V
  int64_t max_position_embeddings = 32768;
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool qkv_bias = true;
  /// Element type the weights are stored in, as in the file ("bfloat16", "float32"); empty if it does not say.
  std::string dtype;
  /// −1 when absent. A list of end tokens keeps its first one.
  int64_t bos_token_id = -1;
  int64_t eos_token_id = -1;

  bool operator==(const ModelConfig&) const = default;
};

/// Throws InputError when a size is not positive, Hkv does not divide Hq, D is odd, or a number is out of range.
/// `where` begins the message: the file, or the section of a run file.
void check_config(const ModelConfig& config, std::string_view where);

/// Reads config.json (`path` is the file or its folder). Both spellings are read: rope_theta + rope_scaling +
/// torch_dtype, and rope_parameters + dtype; where both are there they must agree.
/// Throws InputError naming file and key: missing or wrongly typed keys, values that fail check_config, and by name
/// every feature that would change the maths and is not implemented (another model_type, RoPE scaling, sliding windows,
/// sinks, experts, quantisation, other activations or biases, partial or multimodal RoPE).
ModelConfig read_hf_config(const std::string& path);

/// The same from text; `where` stands for the file in messages.
ModelConfig parse_hf_config(std::string_view text, const std::string& where);

/// A config.json that transformers 4 and 5 load as `config.architecture`. `dtype` as in "bfloat16", "float32".
std::string hf_config_text(const ModelConfig& config, std::string_view dtype);

/// RoPE frequencies in radians per position: θ^(−2i/D) for i in [0, D/2). Half-split layout: dimension i rotates with
/// dimension i + D/2.
std::vector<double> inverse_frequencies(const ModelConfig& config);

/// All parameters, the tied head counted once.
int64_t num_parameters(const ModelConfig& config);

}  // namespace oomb::model
