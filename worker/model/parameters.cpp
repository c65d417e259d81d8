#include "worker/model/parameters.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/adamw.h"

namespace oomb::model {

namespace {

struct Shape {
  std::string name;
  std::vector<ParameterPart> parts;
  std::vector<int64_t> size;
  InitKind init;
};

std::vector<Shape> layer_shapes(const ModelConfig& c, int64_t l) {
  const std::string hf = "model.layers." + std::to_string(l) + ".", ours = "layers." + std::to_string(l) + ".";
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const auto qkv_parts = [&](const std::string& kind) {
    return std::vector<ParameterPart>{{hf + "self_attn.q_proj." + kind, 0, q},
                                      {hf + "self_attn.k_proj." + kind, q, kv},
                                      {hf + "self_attn.v_proj." + kind, q + kv, kv}};
  };
  const auto whole = [&](const std::string& name, int64_t rows) {
    return std::vector<ParameterPart>{{hf + name, 0, rows}};
  };
  const int64_t inter = c.intermediate_size, hidden = c.hidden_size;
  return {
      {ours + "input_norm", whole("input_layernorm.weight", hidden), {hidden}, InitKind::ones},
      {ours + "qkv", qkv_parts("weight"), {q + 2 * kv, hidden}, InitKind::normal},
      {ours + "qkv_bias", qkv_parts("bias"), {q + 2 * kv}, InitKind::zeros},
      {ours + "output", whole("self_attn.o_proj.weight", hidden), {hidden, q}, InitKind::normal},
      {ours + "post_norm", whole("post_attention_layernorm.weight", hidden), {hidden}, InitKind::ones},
      {ours + "gate_up",
       {{hf + "mlp.gate_proj.weight", 0, inter}, {hf + "mlp.up_proj.weight", inter, inter}},
       {2 * inter, hidden},
       InitKind::normal},
      {ours + "down", whole("mlp.down_proj.weight", hidden), {hidden, inter}, InitKind::normal},
  };
}

Parameter make_parameter(const Shape& shape, const TensorTypes& types, bool training, StateFormat format) {
  Parameter p;
  p.name = shape.name;
  p.parts = shape.parts;
  p.init = shape.init;
  p.decayed = shape.size.size() > 1;
  p.weight = at::zeros(shape.size, types.compute_options());
  if (training) {
    if (!format.stochastic_rounding) {
      p.master = types.compute == types.acc() ? p.weight : at::zeros(shape.size, types.acc_options());
    }
    p.grad = at::zeros(shape.size, types.acc_options());
    const at::TensorOptions moments = format.int8_moments ? types.acc_options().dtype(at::kByte) : types.acc_options();
    p.m = at::zeros(shape.size, moments);
    p.v = at::zeros(shape.size, moments);
    if (format.int8_moments) {
      p.m_scale = at::zeros({kernels::num_moment_blocks(p.m.numel())}, types.acc_options());
      p.v_scale = at::zeros_like(p.m_scale);
    }
  }
  return p;
}

}  // namespace

uint64_t stream_seed(uint64_t seed, const std::string& name) {
  uint64_t hash = 14695981039346656037ULL ^ seed;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

Parameters::Parameters(const ModelConfig& config, const TensorTypes& types, bool training, StateFormat format)
    : config_(config), types_(types), format_(format) {
  if (format.stochastic_rounding && types.compute != at::kBFloat16)
    throw std::logic_error("stochastic rounding is for bf16 weights");
  if (format.int8_moments && types.acc() != at::kFloat) throw std::logic_error("8-bit moments go with fp32 sums");
  std::vector<Shape> shapes;
  shapes.push_back({"embedding",
                    {{"model.embed_tokens.weight", 0, config.vocab_size}},
                    {config.vocab_size, config.hidden_size},
                    InitKind::normal});
  const size_t per_layer = layer_shapes(config, 0).size();
  for (int64_t l = 0; l < config.num_layers; ++l) {
    for (Shape& shape : layer_shapes(config, l)) shapes.push_back(std::move(shape));
  }
  shapes.push_back(
      {"final_norm", {{"model.norm.weight", 0, config.hidden_size}}, {config.hidden_size}, InitKind::ones});
  if (!config.tie_word_embeddings) {
    shapes.push_back({"head",
                      {{"lm_head.weight", 0, config.vocab_size}},
                      {config.vocab_size, config.hidden_size},
                      InitKind::normal});
  }
  all_.reserve(shapes.size());
  for (const Shape& shape : shapes) all_.push_back(make_parameter(shape, types, training, format));

  embedding_ = &all_[0];
  for (int64_t l = 0; l < config.num_layers; ++l) {
    Parameter* p = &all_[1 + static_cast<size_t>(l) * per_layer];
    layers_.push_back({p, p + 1, p + 2, p + 3, p + 4, p + 5, p + 6});
  }
  final_norm_ = &all_[1 + static_cast<size_t>(config.num_layers) * per_layer];
  head_ = config.tie_word_embeddings ? embedding_ : &all_.back();
}

void Parameters::initialise(uint64_t seed, double std) {
  // Weights without a master are drawn in acc too, through one buffer of the largest parameter's size.
  at::Tensor buffer;
  const auto drawn_like = [&](const at::Tensor& target) {
    if (target.scalar_type() == types_.acc()) return target;
    if (!buffer.defined()) {
      int64_t largest = 0;
      for (const Parameter& p : all_) largest = std::max(largest, p.weight.numel());
      buffer = at::empty({largest}, types_.acc_options());
    }
    return buffer.narrow(0, 0, target.numel()).view(target.sizes());
  };
  for (Parameter& p : all_) {
    at::Tensor& target = p.source();
    switch (p.init) {
      case InitKind::zeros:
        target.zero_();
        break;
      case InitKind::ones:
        target.fill_(1);
        break;
      case InitKind::normal: {
        at::Generator generator = at::globalContext().defaultGenerator(target.device());
        generator.set_current_seed(stream_seed(seed, p.name));
        at::Tensor drawn = drawn_like(target).normal_(0.0, std);
        if (!drawn.is_same(target)) target.copy_(drawn);
        break;
      }
    }
  }
  refresh_weights();
}

void Parameters::load(const std::function<void(const std::string&, at::Tensor&)>& read) {
  for (Parameter& p : all_) {
    at::Tensor& target = p.source();
    for (const ParameterPart& part : p.parts) {
      at::Tensor rows = target.narrow(0, part.row, part.rows);
      read(part.hf_name, rows);
    }
  }
  refresh_weights();
}

void Parameters::refresh_weights() {
  for (Parameter& p : all_) {
    if (p.master.defined() && !p.master.is_same(p.weight)) p.weight.copy_(p.master);
  }
}

void Parameters::zero_gradients() {
  for (Parameter& p : all_) {
    if (p.grad.defined()) p.grad.zero_();
  }
}

int64_t Parameters::num_elements() const {
  int64_t sum = 0;
  for (const Parameter& p : all_) sum += p.weight.numel();
  return sum;
}

}  // namespace oomb::model
