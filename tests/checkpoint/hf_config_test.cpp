#include "worker/model/hf_config.h"

#include <random>

#include "tests/data/test_files.h"

namespace oomb::model {
namespace {

using test::error_of;
using test::expect_mentions;
using test::TempFolder;

// The published config.json of Qwen2.5-7B.
constexpr const char* kQwen7b = R"({
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
  "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
  "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
  "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
  "vocab_size": 152064 })";

constexpr const char* kMinimal = R"("model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100)";

/// A minimal config with `extra` keys.
std::string with(const std::string& extra) {
  return std::string("{") + kMinimal + (extra.empty() ? "" : ", " + extra) + "}";
}

/// The published config with one piece of text replaced.
std::string changed(const std::string& from, const std::string& to) {
  std::string text = kQwen7b;
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::logic_error("no '" + from + "'");
  return text.replace(at, from.size(), to);
}

TEST(HfConfig, Qwen25) {
  const ModelConfig config = parse_hf_config(kQwen7b, "config.json");
  EXPECT_EQ(config.hidden_size, 3584);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.dtype, "bfloat16");
  EXPECT_EQ(config.eos_token_id, 151643);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(num_parameters(config), 7615616512);
}

TEST(HfConfig, InverseFrequencies) {
  const auto f = inverse_frequencies(parse_hf_config(kQwen7b, "config.json"));
  ASSERT_EQ(f.size(), 64u);
  EXPECT_EQ(f[0], 1.0);
  EXPECT_NEAR(f[30], 1.539927e-3, 1e-9);
  EXPECT_NEAR(f[40], 1.778279e-4, 1e-10);
  EXPECT_NEAR(f[63], 1.240938e-6, 1e-12);
}

TEST(HfConfig, NewSpelling) {
  std::string text =
      changed("\"rope_theta\": 1000000.0", R"("rope_parameters": {"rope_theta": 1000000, "rope_type": "default"})");
  text.replace(text.find("torch_dtype"), 11, "dtype");
  EXPECT_EQ(parse_hf_config(text, "c"), parse_hf_config(kQwen7b, "c"));
  EXPECT_EQ(parse_hf_config(with(R"("rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000.0})"), "c").rope_theta,
            5e5);
  expect_mentions(
      error_of([] { parse_hf_config(with(R"("rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6})"), "c.json"); }),
      {"c.json", "rope_theta", "rope_parameters"});
  expect_mentions(error_of([] { parse_hf_config(with(R"("dtype": "float32", "torch_dtype": "bfloat16")"), "c"); }),
                  {"dtype"});
}

TEST(HfConfig, Defaults) {
  const ModelConfig config = parse_hf_config(with(""), "c");
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.dtype, "");
  EXPECT_EQ(config.eos_token_id, -1);
  EXPECT_EQ(parse_hf_config(with(R"("head_dim": 32)"), "c").head_dim, 32);
  EXPECT_EQ(parse_hf_config(with(R"("eos_token_id": [7, 8], "quantization_config": null)"), "c").eos_token_id, 7);
  EXPECT_EQ(parse_hf_config(with(R"("rope_scaling": null, "layer_types": ["full_attention", "full_attention"])"), "c"),
            config);
}

TEST(HfConfig, RefusesByName) {
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {R"("rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})",
       {"rope_scaling", "yarn"}},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0})", {"rope_scaling", "llama3"}},
      {R"("rope_parameters": {"rope_type": "linear", "factor": 2.0})", {"rope_parameters", "linear"}},
      {R"("rope_scaling": {"factor": 2.0})", {"rope_scaling", "factor"}},
      {R"("rope_scaling": {"attn_factor": 2.0})", {"rope_scaling", "attn_factor"}},
      {R"("rope_scaling": {"mrope_section": [16, 24, 24]})", {"mrope_section"}},
      {R"("rope_scaling": "yarn")", {"rope_scaling", "object"}},
      {R"("use_sliding_window": true)", {"use_sliding_window"}},
      {R"("layer_types": ["full_attention", "sliding_attention"])", {"layer_types", "sliding_attention"}},
      {R"("quantization_config": {"quant_method": "mxfp4"})", {"quantization_config"}},
      {R"("num_experts": 64)", {"num_experts"}},
      {R"("num_local_experts": 32)", {"num_local_experts"}},
      {R"("use_mrope": true)", {"use_mrope"}},
      {R"("attention_sinks": true)", {"attention_sinks"}},
      {R"("hidden_act": "gelu")", {"hidden_act", "gelu"}},
      {R"("attention_dropout": 0.1)", {"attention_dropout"}},
      {R"("attention_bias": false)", {"attention_bias"}},
      {R"("architectures": ["Qwen2ForSequenceClassification"])", {"architectures", "Qwen2ForSequenceClassification"}},
      {R"("partial_rotary_factor": 0.5)", {"partial_rotary_factor"}},
  };
  for (const auto& [extra, parts] : cases) {
    const std::string message = error_of([&] { parse_hf_config(with(extra), "folder/config.json"); });
    expect_mentions(message, {"folder/config.json"});
    for (const auto& part : parts) expect_mentions(message, {part});
  }
  for (const char* type : {"llama", "qwen3", "gpt_oss", "qwen2_moe", "qwen2_vl", "mistral"}) {
    const std::string text = changed("\"qwen2\"", std::string("\"") + type + "\"");
    expect_mentions(error_of([&] { parse_hf_config(text, "c.json"); }), {"c.json", "model_type", type});
  }
}

TEST(HfConfig, RefusesImpossibleShapesAndTypes) {
  const auto refuse = [](const std::string& from, const std::string& to, std::initializer_list<std::string> parts) {
    const std::string message = error_of([&] { parse_hf_config(changed(from, to), "c.json"); });
    expect_mentions(message, {"c.json"});
    expect_mentions(message, parts);
  };
  refuse("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 5", {"num_attention_heads 28", "5"});
  refuse("\"num_attention_heads\": 28", "\"num_attention_heads\": 24", {"head_dim", "3584", "24"});
  refuse("\"num_attention_heads\": 28", "\"head_dim\": 127, \"num_attention_heads\": 28", {"head_dim 127", "even"});
  refuse("\"hidden_size\": 3584", "\"hidden_size\": 0", {"hidden_size"});
  refuse("\"hidden_size\": 3584", "\"hidden_size\": -3584", {"hidden_size"});
  refuse("\"hidden_size\": 3584", "\"hidden_size\": 99999999999999", {"hidden_size"});
  refuse("\"hidden_size\": 3584", "\"hidden_size\": 3584.5", {"hidden_size", "integer"});
  refuse("\"hidden_size\": 3584", "\"hidden_size\": \"3584\"", {"hidden_size", "integer"});
  refuse("\"hidden_size\": 3584, ", "", {"hidden_size", "missing"});
  refuse("\"num_attention_heads\": 28", "\"num_attention_heads\": 0", {"num_attention_heads"});
  refuse("\"vocab_size\": 152064", "\"vocab_size\": null", {"vocab_size", "missing"});
  refuse("\"vocab_size\": 152064", "\"vocab_size\": 152064, \"vocab_size\": 151936", {"vocab_size", "twice"});
  refuse("\"rope_theta\": 1000000.0", "\"rope_theta\": \"1e6\"", {"rope_theta", "number"});
  refuse("\"rope_theta\": 1000000.0", "\"rope_theta\": -1", {"rope_theta"});
  refuse("\"rope_theta\": 1000000.0", "\"rope_theta\": 1e999", {"JSON"});
  refuse("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": -1e-06", {"rms_norm_eps"});
  refuse("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0", {"tie_word_embeddings", "true or false"});
  refuse("\"bos_token_id\": 151643", "\"bos_token_id\": \"x\"", {"bos_token_id"});
  refuse("\"model_type\": \"qwen2\"", "\"model_type\": 7", {"model_type", "string"});
  error_of([] { parse_hf_config("", "c.json"); });
  error_of([] { parse_hf_config("[1, 2]", "c.json"); });
  error_of([] { parse_hf_config("{\"a\": ", "c.json"); });
  error_of([] { parse_hf_config(std::string(100000, '['), "c.json"); });
}

TEST(HfConfig, RoundTrip) {
  ModelConfig config = parse_hf_config(kQwen7b, "c");
  config.head_dim = 96;
  config.rope_theta = 123456.78901234567;
  config.rms_norm_eps = 1e-5;
  config.tie_word_embeddings = true;
  config.dtype = "float32";
  const std::string text = hf_config_text(config, "float32");
  EXPECT_EQ(parse_hf_config(text, "written"), config);
  const TempFolder dir;
  const std::string file = dir.write("config.json", text);
  EXPECT_EQ(read_hf_config(dir.path()), config);
  EXPECT_EQ(read_hf_config(file), config);
  expect_mentions(error_of([&] { read_hf_config(dir / "missing"); }), {"missing"});
  std::filesystem::create_directory(dir / "empty");
  expect_mentions(error_of([&] { read_hf_config(dir / "empty"); }), {"empty/config.json"});
}

TEST(HfConfig, SurvivesGarbage) {
  constexpr uint64_t kSeed = 7;
  std::mt19937_64 random(kSeed);
  int64_t refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text = kQwen7b;
    for (uint64_t flips = 1 + random() % 3; flips-- > 0;) text[random() % text.size()] = static_cast<char>(random());
    if (random() % 8 == 0) text.resize(random() % text.size());
    try {
      check_config(parse_hf_config(text, "c"), "c");
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace oomb::model
