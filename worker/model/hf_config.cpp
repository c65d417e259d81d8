#include "worker/model/hf_config.h"

#include <sys/stat.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "configs/error.h"
#include "worker/checkpoint/strict_json.h"
#include "worker/data/mapped_file.h"

namespace oomb::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

/// Typed access to the keys of one object; null counts as absent, as transformers has it.
class Keys {
 public:
  Keys(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) throw InputError(where_ + ": must be a JSON object");
  }

  const Json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw InputError(where_ + ": " + checkpoint::printable(key) + " " + what);
  }

  std::optional<int64_t> integer(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer()) fail(key, "must be an integer, not " + shown(*value));
    if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(kMaxSize)) {
      fail(key, "is out of range: " + shown(*value));
    }
    return value->get<int64_t>();
  }

  int64_t required_integer(const char* key) const {
    const auto value = integer(key);
    if (!value) fail(key, "is missing");
    return *value;
  }

  std::optional<double> number(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) fail(key, "must be a number, not " + shown(*value));
    return value->get<double>();
  }

  std::optional<bool> boolean(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) fail(key, "must be true or false, not " + shown(*value));
    return value->get<bool>();
  }

  std::optional<std::string> text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) fail(key, "must be a string, not " + shown(*value));
    return value->get<std::string>();
  }

  static std::string shown(const Json& value) {
    std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
  }

 private:
  const Json& object_;
  std::string where_;
};

/// Everything about positions: RoPE type and base, in the old and the new spelling.
double read_rope(const Keys& keys, const std::string& where) {
  std::optional<double> theta = keys.number("rope_theta");
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* section = keys.find(key);
    if (section == nullptr) continue;
    const std::string path = where + ": " + key;
    const Keys rope(*section, path);
    for (const char* type_key : {"rope_type", "type"}) {
      const auto type = rope.text(type_key);
      if (type && *type != "default") {
        rope.fail(type_key,
                  "\"" + checkpoint::printable(*type) + "\" is not supported: only plain RoPE (\"default\") is");
      }
    }
    const auto inner = rope.number("rope_theta");
    if (inner && theta && *inner != *theta) keys.fail("rope_theta", "disagrees with the one in " + std::string(key));
    if (inner) theta = inner;
    const auto factor = rope.number("factor");
    if (factor && *factor != 1.0) rope.fail("factor", "is not supported: RoPE scaling is not");
    const auto partial = rope.number("partial_rotary_factor");
    if (partial && *partial != 1.0) rope.fail("partial_rotary_factor", "is not supported: RoPE covers whole heads");
    for (const auto& [name, value] : section->items()) {
      static constexpr std::array<std::string_view, 5> kKnown{"rope_type", "type", "rope_theta", "factor",
                                                              "partial_rotary_factor"};
      bool known = value.is_null();
      for (const std::string_view k : kKnown) known = known || k == name;
      if (!known) rope.fail(name, "is not supported");
    }
  }
  const auto partial = keys.number("partial_rotary_factor");
  if (partial && *partial != 1.0) keys.fail("partial_rotary_factor", "is not supported: RoPE covers whole heads");
  return theta.value_or(10000.0);
}

/// Features that change the maths and that we do not have. Refused by name rather than ignored.
void refuse_unsupported(const Keys& keys) {
  if (keys.boolean("use_sliding_window").value_or(false)) {
    keys.fail("use_sliding_window", "is not supported: set it to false or use a model without sliding windows");
  }
  if (const Json* layers = keys.find("layer_types")) {
    if (!layers->is_array()) keys.fail("layer_types", "must be a list");
    for (const Json& layer : *layers) {
      if (layer != "full_attention")
        keys.fail("layer_types", "has " + Keys::shown(layer) + ": only full_attention is supported");
    }
  }
  for (const char* key : {"use_mrope", "attention_sinks", "use_sinks", "use_qk_norm", "mlp_bias", "attention_o_bias"}) {
    if (const Json* value = keys.find(key); value != nullptr && *value != false) keys.fail(key, "is not supported");
  }
  for (const char* key :
       {"quantization_config", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size", "attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "vision_config",
        "text_config", "dual_chunk_attention_config", "kv_lora_rank"}) {
    if (keys.find(key) != nullptr) keys.fail(key, "is not supported");
  }
  if (const auto act = keys.text("hidden_act"); act && *act != "silu") {
    keys.fail("hidden_act", "\"" + checkpoint::printable(*act) + "\" is not supported: only silu is");
  }
  if (const auto dropout = keys.number("attention_dropout"); dropout && *dropout != 0.0) {
    keys.fail("attention_dropout", "is not supported: set it to 0");
  }
  // Qwen2 always has q, k and v biases; its code does not look at this key.
  if (keys.find("attention_bias") != nullptr && !keys.boolean("attention_bias").value()) {
    keys.fail("attention_bias", "false is not supported: this family has q, k and v biases");
  }
}

int64_t token_id(const Keys& keys, const char* key) {
  const Json* value = keys.find(key);
  if (value == nullptr) return -1;
  const Json& first = value->is_array() && !value->empty() ? value->front() : *value;
  if (!first.is_number_unsigned() || first.get<uint64_t>() > static_cast<uint64_t>(kMaxSize)) {
    keys.fail(key, "must be a token id or a list of them, not " + Keys::shown(*value));
  }
  return first.get<int64_t>();
}

std::string architecture_of(const Keys& keys) {
  const Json* list = keys.find("architectures");
  if (list == nullptr) return "Qwen2ForCausalLM";
  if (!list->is_array() || list->size() != 1 || !list->front().is_string()) {
    keys.fail("architectures", "must be a list of one name");
  }
  const auto name = list->front().get<std::string>();
  if (name != "Qwen2ForCausalLM") {
    keys.fail("architectures", "\"" + checkpoint::printable(name) + "\" is not supported: Qwen2ForCausalLM is");
  }
  return name;
}

std::string dtype_of(const Keys& keys) {
  auto old_name = keys.text("torch_dtype");
  auto new_name = keys.text("dtype");
  if (old_name && new_name && *old_name != *new_name) keys.fail("dtype", "disagrees with torch_dtype");
  return new_name ? *new_name : old_name.value_or("");
}

}  // namespace

void check_config(const ModelConfig& config, std::string_view where) {
  const auto fail = [&](const std::string& what) { throw InputError(std::string(where) + ": " + what); };
  const std::pair<const char*, int64_t> sizes[] = {{"hidden_size", config.hidden_size},
                                                   {"intermediate_size", config.intermediate_size},
                                                   {"num_hidden_layers", config.num_layers},
                                                   {"num_attention_heads", config.num_heads},
                                                   {"num_key_value_heads", config.num_kv_heads},
                                                   {"head_dim", config.head_dim},
                                                   {"vocab_size", config.vocab_size},
                                                   {"max_position_embeddings", config.max_position_embeddings}};
  for (const auto& [name, value] : sizes) {
    if (value < 1 || value > kMaxSize)
      fail(std::string(name) + " " + std::to_string(value) + " must be positive and below 2^31");
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    fail("num_attention_heads " + std::to_string(config.num_heads) + " must be a multiple of num_key_value_heads " +
         std::to_string(config.num_kv_heads));
  }
  if (config.head_dim % 2 != 0) fail("head_dim " + std::to_string(config.head_dim) + " must be even: RoPE turns pairs");
  if (!(config.rope_theta > 0) || !std::isfinite(config.rope_theta)) fail("rope_theta must be positive");
  if (!(config.rms_norm_eps >= 0) || !std::isfinite(config.rms_norm_eps)) fail("rms_norm_eps must not be negative");
  if (!(config.initializer_range >= 0) || !std::isfinite(config.initializer_range)) {
    fail("initializer_range must not be negative");
  }
}

ModelConfig parse_hf_config(std::string_view text, const std::string& where) {
  const Json root = checkpoint::parse_strict_json(text, where);
  const Keys keys(root, where);
  ModelConfig config;
  const auto type = keys.text("model_type");
  if (!type) keys.fail("model_type", "is missing: want \"qwen2\"");
  if (*type != "qwen2")
    keys.fail("model_type", "\"" + checkpoint::printable(*type) + "\" is not supported: \"qwen2\" is");
  config.architecture = architecture_of(keys);
  refuse_unsupported(keys);
  config.hidden_size = keys.required_integer("hidden_size");
  config.intermediate_size = keys.required_integer("intermediate_size");
  config.num_layers = keys.required_integer("num_hidden_layers");
  config.num_heads = keys.required_integer("num_attention_heads");
  config.num_kv_heads = keys.integer("num_key_value_heads").value_or(config.num_heads);
  if (const auto head_dim = keys.integer("head_dim")) {
    config.head_dim = *head_dim;
  } else if (config.num_heads > 0) {
    if (config.hidden_size % config.num_heads != 0) {
      keys.fail("head_dim", "is missing and hidden_size " + std::to_string(config.hidden_size) +
                                " is not a multiple of num_attention_heads " + std::to_string(config.num_heads));
    }
    config.head_dim = config.hidden_size / config.num_heads;
  }
  config.vocab_size = keys.required_integer("vocab_size");
  config.max_position_embeddings = keys.integer("max_position_embeddings").value_or(config.max_position_embeddings);
  config.rope_theta = read_rope(keys, where);
  config.rms_norm_eps = keys.number("rms_norm_eps").value_or(config.rms_norm_eps);
  config.initializer_range = keys.number("initializer_range").value_or(config.initializer_range);
  config.tie_word_embeddings = keys.boolean("tie_word_embeddings").value_or(false);
  config.dtype = dtype_of(keys);
  config.bos_token_id = token_id(keys, "bos_token_id");
  config.eos_token_id = token_id(keys, "eos_token_id");
  check_config(config, where);
  return config;
}

ModelConfig read_hf_config(const std::string& path) {
  struct stat info {};
  const bool is_folder = ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  const data::MappedFile file(is_folder ? path + "/config.json" : path);
  const auto bytes = file.bytes();
  return parse_hf_config({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.path());
}

std::string hf_config_text(const ModelConfig& config, std::string_view dtype) {
  check_config(config, "model");
  if (!config.qkv_bias) throw std::logic_error("hf_config_text: Qwen2 has q, k and v biases");
  nlohmann::ordered_json root;
  root["architectures"] = {config.architecture};
  root["model_type"] = config.model_type;
  root["hidden_size"] = config.hidden_size;
  root["intermediate_size"] = config.intermediate_size;
  root["num_hidden_layers"] = config.num_layers;
  root["num_attention_heads"] = config.num_heads;
  root["num_key_value_heads"] = config.num_kv_heads;
  root["head_dim"] = config.head_dim;
  root["vocab_size"] = config.vocab_size;
  root["max_position_embeddings"] = config.max_position_embeddings;
  root["hidden_act"] = "silu";
  root["rms_norm_eps"] = config.rms_norm_eps;
  root["initializer_range"] = config.initializer_range;
  root["tie_word_embeddings"] = config.tie_word_embeddings;
  root["attention_dropout"] = 0.0;
  root["use_cache"] = true;
  root["use_sliding_window"] = false;
  // Version 4 of transformers reads rope_theta and torch_dtype; version 5 reads these two as well as its own names.
  root["rope_theta"] = config.rope_theta;
  root["torch_dtype"] = dtype;
  if (config.bos_token_id >= 0) root["bos_token_id"] = config.bos_token_id;
  if (config.eos_token_id >= 0) root["eos_token_id"] = config.eos_token_id;
  return root.dump(2) + "\n";
}

std::vector<double> inverse_frequencies(const ModelConfig& config) {
  std::vector<double> result(static_cast<size_t>(config.head_dim / 2));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim));
  }
  return result;
}

int64_t num_parameters(const ModelConfig& config) {
  const int64_t q = config.num_heads * config.head_dim;
  const int64_t kv = config.num_kv_heads * config.head_dim;
  const int64_t h = config.hidden_size;
  const int64_t bias = config.qkv_bias ? q + 2 * kv : 0;
  const int64_t layer = 2 * h * (q + kv) + bias + 3 * h * config.intermediate_size + 2 * h;
  const int64_t embeddings = config.vocab_size * h * (config.tie_word_embeddings ? 1 : 2);
  return config.num_layers * layer + embeddings + h;
}

}  // namespace oomb::model
