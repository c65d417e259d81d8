#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "worker/bench/measurements.h"

namespace oomb::bench {

namespace {

using nlohmann::json;

// Rows of one chunk, C tokens; `e` bytes per element of the compute type.
class KernelBench {
 public:
  explicit KernelBench(const Workbench& bench)
      : bench_(bench),
        m_(bench.model),
        types_(bench.types),
        tokens_(bench.chunk_tokens()),
        e_(static_cast<double>(c10::elementSize(bench.types.compute))) {}

  json run() {
    norms();
    swiglus();
    rotation();
    loss();
    embedding();
    optimizer();
    const int64_t q = m_.num_heads * m_.head_dim, kv = m_.num_kv_heads * m_.head_dim;
    weight_gradient("wgrad qkv", q + 2 * kv, m_.hidden_size);
    weight_gradient("wgrad output", m_.hidden_size, q);
    weight_gradient("wgrad gate_up", 2 * m_.intermediate_size, m_.hidden_size);
    weight_gradient("wgrad down", m_.hidden_size, m_.intermediate_size);
    return rows_;
  }

 private:
  at::Tensor random(at::IntArrayRef size) const { return at::randn(size, types_.compute_options()); }
  void add(const std::string& op, const std::string& shape, const Work& work, const std::function<void()>& call) {
    rows_.push_back(timed_row(bench_, op, shape, work, call));
  }

  void norms() {
    const at::Tensor x = random({tokens_, m_.hidden_size}), delta = random({tokens_, m_.hidden_size});
    const at::Tensor weight = random({m_.hidden_size});
    at::Tensor dweight = at::zeros({m_.hidden_size}, types_.acc_options());
    const Work four_passes{.bytes = 4 * e_ * static_cast<double>(x.numel())};
    const std::string shape = shape_text({tokens_, m_.hidden_size});
    const NormOutput norm = rms_norm(x, delta, weight, m_.rms_norm_eps);
    add("rms_norm + residual", shape, four_passes, [&] { rms_norm(x, delta, weight, m_.rms_norm_eps); });
    add("rms_norm backward + residual", shape, four_passes,
        [&] { rms_norm_backward(delta, norm.sum, weight, norm.inv_rms, x, dweight); });
  }

  void swiglus() {
    const int64_t width = m_.intermediate_size;
    const at::Tensor gate_up = random({tokens_, 2 * width}), dy = random({tokens_, width});
    const auto n = static_cast<double>(dy.numel());
    const std::string shape = shape_text({tokens_, width});
    add("swiglu", shape, {.bytes = 3 * e_ * n}, [&] { swiglu(gate_up); });
    add("swiglu backward", shape, {.bytes = 6 * e_ * n}, [&] { swiglu_backward(gate_up, dy); });
  }

  void rotation() {
    const int64_t group = m_.num_heads / m_.num_kv_heads, dim = m_.head_dim;
    const std::vector<double> frequencies = model::inverse_frequencies(m_);
    const at::Tensor inv_freq = at::tensor(frequencies, at::kDouble).to(types_.device);
    const RopeTables tables = rope_tables(at::arange(tokens_, types_.index_options()), inv_freq, types_.acc());
    const at::Tensor x = random({tokens_, m_.num_heads * dim});
    const double tables_bytes = 2.0 * static_cast<double>(tables.cos.numel() * tables.cos.element_size());
    add("rope of queries", shape_text({tokens_, m_.num_heads, dim}),
        {.bytes = 2 * e_ * static_cast<double>(x.numel()) + tables_bytes},
        [&] { heads_from_rows(x, 0, m_.num_kv_heads, group, dim, &tables); });
  }

  void loss() {
    const int64_t rows = std::min(bench_.options.loss_row_tile, tokens_), vocab = m_.vocab_size;
    at::Tensor logits = random({rows, vocab});
    const at::Tensor labels = at::randint(vocab, {rows}, types_.index_options());
    at::Tensor losses = at::empty({rows}, types_.acc_options());
    kernels::CrossEntropy op;
    op.num_rows = rows;
    op.vocab = vocab;
    op.row_stride = vocab;
    op.dtype = dtype_of(logits);
    op.logits = logits.data_ptr();
    op.labels = labels.data_ptr<int64_t>();
    op.loss = losses.data_ptr();
    // Logits become their gradient; applied again it meets other values and does the same work.
    add("cross_entropy with gradient", shape_text({rows, vocab}),
        {.bytes = 2 * e_ * static_cast<double>(logits.numel())},
        [&] { check(kernels::cross_entropy(queue_of(logits), op), "cross_entropy"); });
  }

  void embedding() {
    const at::Tensor table = random({m_.vocab_size, m_.hidden_size});
    const at::Tensor ids = at::randint(m_.vocab_size, {tokens_}, types_.index_options());
    at::Tensor y = at::empty({tokens_, m_.hidden_size}, types_.compute_options());
    kernels::EmbeddingForward op;
    op.num_tokens = tokens_;
    op.hidden = m_.hidden_size;
    op.vocab = m_.vocab_size;
    op.dtype = dtype_of(y);
    op.ids = ids.data_ptr<int64_t>();
    op.table = table.data_ptr();
    op.y = y.data_ptr();
    add("embedding", shape_text({tokens_, m_.hidden_size}), {.bytes = 2 * e_ * static_cast<double>(y.numel())},
        [&] { check(kernels::embedding_forward(queue_of(y), op), "embedding_forward"); });
  }

  // States in acc whatever the run's formats are; the run's own are part of `step`.
  void optimizer() {
    const int64_t n = 2 * m_.intermediate_size * m_.hidden_size;
    at::Tensor master = at::randn({n}, types_.acc_options()), m = at::zeros_like(master), v = at::zeros_like(master);
    const at::Tensor grad = at::randn_like(master);
    at::Tensor weight = at::empty({n}, types_.compute_options());
    kernels::AdamW op;
    op.num_elements = n;
    op.acc = dtype_of(master);
    op.lr = 1e-6;
    op.master = master.data_ptr();
    op.grad = grad.data_ptr();
    op.m = m.data_ptr();
    op.v = v.data_ptr();
    const bool copies = types_.compute != types_.acc();
    if (copies) {
      op.weight = weight.data_ptr();
      op.weight_dtype = dtype_of(weight);
    }
    const double bytes_each = 7.0 * static_cast<double>(master.element_size()) + (copies ? e_ : 0.0);
    add("adamw, plain states", shape_text({n}), {.bytes = bytes_each * static_cast<double>(n)},
        [&] { check(kernels::adamw_step(queue_of(master), op), "adamw_step"); });
  }

  void weight_gradient(const std::string& name, int64_t out, int64_t in) {
    const at::Tensor dy = random({tokens_, out}), x = random({tokens_, in});
    at::Tensor dw = at::zeros({out, in}, types_.acc_options());
    const double flops = 2.0 * static_cast<double>(tokens_) * static_cast<double>(out) * static_cast<double>(in);
    add(name, shape_text({tokens_, out, in}), {.flops = flops}, [&] { accumulate_weight_gradient(dy, x, dw); });
  }

  const Workbench& bench_;
  const model::ModelConfig& m_;
  const TensorTypes& types_;
  int64_t tokens_;
  double e_;
  json rows_ = json::array();
};

}  // namespace

json measure_kernels(const Workbench& bench) { return KernelBench(bench).run(); }

}  // namespace oomb::bench
