#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gemm_accumulate.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "tests/bench/bench.h"

namespace oomb::kernels::bench {
namespace {

constexpr int64_t kTokens = 4096, kHidden = 3584, kWidth = 18944, kVocab = 152064;
constexpr int64_t kHeads = 28, kKvHeads = 4, kDim = 128;
const DType kTypes[] = {DType::bf16, DType::f32};
const char* name_of(DType type) { return type == DType::bf16 ? "bf16" : "f32"; }

Block random_block(DType type, int64_t n) {
  Block block(n * size_of(type));
  fill_random(block.get(), type, n);
  return block;
}

void norms(Bench& bench, DType type) {
  const int64_t n = kTokens * kHidden, bytes = n * size_of(type);
  const Block x = random_block(type, n), delta = random_block(type, n), weight = random_block(type, kHidden);
  const Block sum(bytes), y(bytes), inv(kTokens * 4);
  fill_random(inv.get(), DType::f32, kTokens);
  RmsNormForward forward{kTokens,     kHidden,      type,      1e-6,    x.get(),
                         delta.get(), weight.get(), sum.get(), y.get(), inv.get()};
  bench.run(std::string("rms_norm_forward + delta ") + name_of(type), 4.0 * static_cast<double>(bytes), 0,
            [&] { return rms_norm_forward(bench.queue(), forward); });
  forward.delta = nullptr;
  bench.run(std::string("rms_norm_forward ") + name_of(type), 2.0 * static_cast<double>(bytes), 0,
            [&] { return rms_norm_forward(bench.queue(), forward); });
  const Block dweight(kHidden * 4), space(rms_norm_backward_workspace_bytes(bench.queue(), kTokens, kHidden, type));
  const RmsNormBackward backward{kTokens,   kHidden,   type,    x.get(),       delta.get(), weight.get(),
                                 inv.get(), sum.get(), y.get(), dweight.get(), space.get()};
  bench.run(std::string("rms_norm_backward + residual ") + name_of(type), 4.0 * static_cast<double>(bytes), 0,
            [&] { return rms_norm_backward(bench.queue(), backward); });
}

void activations(Bench& bench, DType type) {
  const int64_t n = kTokens * kWidth, bytes = n * size_of(type);
  const Block gate_up = random_block(type, 2 * n), dy = random_block(type, n), d_gate_up(2 * bytes), y(bytes);
  bench.run(std::string("swiglu_forward ") + name_of(type), 3.0 * static_cast<double>(bytes), 0, [&] {
    return swiglu_forward(bench.queue(), {kTokens, kWidth, type, gate_up.get(), y.get()});
  });
  bench.run(std::string("swiglu_backward + y ") + name_of(type), 6.0 * static_cast<double>(bytes), 0, [&] {
    return swiglu_backward(bench.queue(), {kTokens, kWidth, type, gate_up.get(), dy.get(), d_gate_up.get(), y.get()});
  });
}

void rotations(Bench& bench, DType type, int64_t heads) {
  const int64_t n = kTokens * heads * kDim, group = heads / kKvHeads;
  const Block x = random_block(type, n), y(n * size_of(type));
  const Block cos = random_block(DType::f32, kTokens * kDim / 2), sin = random_block(DType::f32, kTokens * kDim / 2);
  const RopeApply op{kTokens,
                     heads,
                     kDim,
                     group,
                     type,
                     false,
                     x.get(),
                     heads * kDim,
                     group * kDim,
                     kDim,
                     y.get(),
                     group * kDim,
                     kTokens * group * kDim,
                     kDim,
                     cos.get(),
                     sin.get()};
  bench.run("rope_apply " + std::to_string(heads) + " heads " + name_of(type),
            2.0 * static_cast<double>(n * size_of(type)) + 4.0 * kTokens * kDim, 0,
            [&] { return rope_apply(bench.queue(), op); });
}

void losses(Bench& bench, DType type) {
  const int64_t rows = 2048, n = rows * kVocab;
  const Block logits = random_block(type, n), labels(rows * 8), loss(rows * 4);
  const CrossEntropy op{rows, kVocab, kVocab, type, 1.0, true, logits.get(), labels.as<int64_t>(), loss.get()};
  bench.run(std::string("cross_entropy 2048 rows ") + name_of(type), 2.0 * static_cast<double>(n * size_of(type)), 0,
            [&] { return cross_entropy(bench.queue(), op); });
}

void optimizer(Bench& bench) {
  const int64_t n = 233057792;  // one layer of Qwen2.5-7B
  const Block master = random_block(DType::f32, n), grad = random_block(DType::f32, n), m(n * 4), v(n * 4),
              weight(n * 2);
  bench.run("adamw_step f32 + bf16 copy", 30.0 * static_cast<double>(n), 0, [&] {
    return adamw_step(bench.queue(), {.num_elements = n,
                                      .lr = 1e-5,
                                      .weight_decay = 0.1,
                                      .master = master.get(),
                                      .grad = grad.get(),
                                      .m = m.get(),
                                      .v = v.get(),
                                      .weight = weight.get()});
  });
  const Block codes_m(n), codes_v(n), scale_m(num_moment_blocks(n) * 4), scale_v(num_moment_blocks(n) * 4);
  const auto scales = 16.0 / kMomentBlock;  // bytes per parameter: two scales, read and written
  AdamW op{.num_elements = n, .lr = 1e-5, .weight_decay = 0.1, .grad = grad.get(), .weight = weight.get()};
  const auto run = [&](const std::string& name, double bytes) {
    bench.run(name, bytes * static_cast<double>(n), 0, [&] { return adamw_step(bench.queue(), op); });
  };
  op.m = m.get();
  op.v = v.get();
  run("adamw_step f32, stochastic bf16 weight", 24.0);
  op.moments = Moments::int8;
  op.m = codes_m.get();
  op.v = codes_v.get();
  op.m_scale = scale_m.as<float>();
  op.v_scale = scale_v.as<float>();
  run("adamw_step int8, stochastic bf16 weight", 12.0 + scales);
  op.master = master.get();
  run("adamw_step int8, master + bf16 copy", 18.0 + scales);
  const Block out(8), space(sum_of_squares_workspace_bytes(bench.queue(), n));
  bench.run("sum_of_squares f32", 4.0 * static_cast<double>(n), 0, [&] {
    return sum_of_squares(bench.queue(), {n, DType::f32, grad.get(), out.as<double>(), space.get()});
  });
}

void embeddings(Bench& bench) {
  const int64_t tokens = 4 * kTokens, n = tokens * kHidden;
  const Block table = random_block(DType::bf16, kVocab * kHidden), y(n * 2), dtable(kVocab * kHidden * 4);
  std::vector<int64_t> ids, begin, order;
  for (int64_t i = 0; i < tokens; ++i) {
    ids.push_back(i * 7919 % kVocab);
    begin.push_back(i);
    order.push_back(i);
  }
  begin.push_back(tokens);
  const Block id_block(tokens * 8), begin_block((tokens + 1) * 8), order_block(tokens * 8);
  BENCH_CUDA(cudaMemcpy(id_block.get(), ids.data(), ids.size() * 8, cudaMemcpyHostToDevice));
  BENCH_CUDA(cudaMemcpy(begin_block.get(), begin.data(), begin.size() * 8, cudaMemcpyHostToDevice));
  BENCH_CUDA(cudaMemcpy(order_block.get(), order.data(), order.size() * 8, cudaMemcpyHostToDevice));
  bench.run("embedding_forward 16384 tokens bf16", 4.0 * static_cast<double>(n), 0, [&] {
    return embedding_forward(bench.queue(),
                             {tokens, kHidden, kVocab, DType::bf16, id_block.as<int64_t>(), table.get(), y.get()});
  });
  bench.run("embedding_backward, all ids distinct, bf16", 10.0 * static_cast<double>(n), 0, [&] {
    return embedding_backward(bench.queue(),
                              {tokens, kHidden, kVocab, DType::bf16, id_block.as<int64_t>(), begin_block.as<int64_t>(),
                               order_block.as<int64_t>(), y.get(), dtable.get()});
  });
}

void gemms(Bench& bench) {
  const Block dy = random_block(DType::bf16, kTokens * kWidth), x = random_block(DType::bf16, kTokens * kHidden);
  const Block dw(kWidth * kHidden * 4);
  const double flops = 2.0 * kTokens * kWidth * kHidden;
  bench.run("gemm_accumulate 4096 x 18944 x 3584 bf16",
            2.0 * kTokens * (kWidth + kHidden) + 8.0 * static_cast<double>(kWidth * kHidden), flops, [&] {
              return gemm_accumulate(
                  bench.queue(), {kTokens, kWidth, kHidden, DType::bf16, dy.get(), kWidth, x.get(), kHidden, dw.get()});
            });
}

}  // namespace

void bench_elementwise(Bench& bench) {
  for (const DType type : kTypes) {
    norms(bench, type);
    activations(bench, type);
    rotations(bench, type, kHeads);
    rotations(bench, type, kKvHeads);
    losses(bench, type);
  }
  optimizer(bench);
  embeddings(bench);
  gemms(bench);
}

}  // namespace oomb::kernels::bench
