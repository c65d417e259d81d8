// The CPU references give the same bits on any number of threads and with any instruction set: every op runs on 1, 2, 3
// and 5 threads, and against a second copy of the same sources, compiled here for the baseline of x86-64 only.
#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/adamw_constants.h"
#include "kernels/blocks.h"
#include "kernels/dispatch.h"
#include "tests/kernels/harness.h"
// What both copies share is included above and here; the sources that follow go to namespace cpu_baseline.
#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gemm_accumulate.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"

#define OOMB_BASELINE_ONLY
#define cpu cpu_baseline
#include "kernels/cpu/adamw.cpp"
#include "kernels/cpu/adamw_blocks.cpp"
#include "kernels/cpu/cross_entropy.cpp"
#include "kernels/cpu/embedding.cpp"
#include "kernels/cpu/rms_norm.cpp"
#include "kernels/cpu/rope.cpp"
#include "kernels/cpu/swiglu.cpp"
#undef cpu

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 113;
using Bytes = std::vector<unsigned char>;

/// Runs the library's op or the copy's.
#define OOMB_RUN(name, ...) EXPECT_OK(baseline ? cpu_baseline::name(__VA_ARGS__) : name(Queue{}, __VA_ARGS__))

struct Inputs {
  DType type;
  int64_t rows, width;
  Buffer x, y, z, weight, inv_rms;

  Inputs(DType t, int64_t r, int64_t w)
      : type(t),
        rows(r),
        width(w),
        x(make(r * 2 * w, 0)),
        y(make(r * 2 * w, 1)),
        z(make(r * w, 2)),
        weight(make(w, 3)),
        inv_rms(Device::cpu, accumulator_of(t), std::vector<double>(static_cast<size_t>(r), 0.7)) {}
  Buffer make(int64_t n, uint64_t salt) const { return {Device::cpu, type, normal_values(n, kSeed + salt, 2.0)}; }
  Buffer out(int64_t n) const { return {Device::cpu, type, std::vector<double>(static_cast<size_t>(n), 0.0)}; }
  Buffer acc(int64_t n) const { return {Device::cpu, accumulator_of(type), normal_values(n, kSeed + 9)}; }
};

void norms(const Inputs& in, bool baseline, std::vector<Bytes>* results) {
  const Buffer sum = in.out(in.rows * in.width), y = in.out(in.rows * in.width), r = in.acc(in.rows);
  OOMB_RUN(rms_norm_forward, RmsNormForward{in.rows, in.width, in.type, 1e-6, in.x.data(), in.y.data(),
                                            in.weight.data(), sum.data(), y.data(), r.data()});
  const Buffer dx = in.out(in.rows * in.width), dweight = in.acc(in.width);
  OOMB_RUN(rms_norm_backward, RmsNormBackward{in.rows, in.width, in.type, in.y.data(), in.x.data(), in.weight.data(),
                                              in.inv_rms.data(), in.z.data(), dx.data(), dweight.data(), nullptr});
  for (const Buffer* b : {&sum, &y, &r, &dx, &dweight}) results->push_back(b->read_bytes());
}

void activations(const Inputs& in, bool baseline, std::vector<Bytes>* results) {
  const Buffer y = in.out(in.rows * in.width), d = in.out(in.rows * 2 * in.width);
  OOMB_RUN(swiglu_forward, SwigluForward{in.rows, in.width, in.type, in.x.data(), y.data()});
  OOMB_RUN(swiglu_backward, SwigluBackward{in.rows, in.width, in.type, in.x.data(), in.z.data(), d.data(), nullptr});
  const int64_t dim = in.width - in.width % 2;
  const Buffer rotated = in.out(in.rows * in.width), cos = in.acc(in.rows * dim), sin = in.acc(in.rows * dim);
  if (dim >= 2) {
    OOMB_RUN(rope_apply, RopeApply{in.rows, 1, dim, 1, in.type, false, in.x.data(), in.width, 0, 0, rotated.data(),
                                   in.width, 0, 0, cos.data(), sin.data()});
  }
  for (const Buffer* b : {&y, &d, &rotated}) results->push_back(b->read_bytes());
}

void losses(const Inputs& in, bool baseline, std::vector<Bytes>* results) {
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < in.rows; ++i) labels.push_back(i % 5 == 0 ? kIgnoredLabel : i % in.width);
  const Buffer logits = in.make(in.rows * in.width, 4), loss = in.acc(in.rows);
  OOMB_RUN(cross_entropy,
           CrossEntropy{in.rows, in.width, in.width, in.type, 0.25, true, logits.data(), labels.data(), loss.data()});
  for (const Buffer* b : {&logits, &loss}) results->push_back(b->read_bytes());
}

void optimizer(const Inputs& in, bool baseline, std::vector<Bytes>* results) {
  const int64_t n = in.rows * in.width;
  const Buffer master = in.acc(n), grad = in.acc(n), m = in.acc(n);
  const Buffer v(Device::cpu, accumulator_of(in.type), std::vector<double>(static_cast<size_t>(n), 0.01));
  const Buffer weight = in.out(n);
  OOMB_RUN(adamw_step, AdamW{n, accumulator_of(in.type), 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, master.data(), grad.data(),
                             m.data(), v.data(), weight.data(), in.type});
  if (in.type != DType::f64) {
    const Buffer coded = in.acc(n), scales(Device::cpu, DType::f32, std::vector<double>(num_moment_blocks(n), 0.25));
    std::vector<uint8_t> m_code(static_cast<size_t>(n)), v_code(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) m_code[i] = v_code[i] = static_cast<uint8_t>(i * 37);
    const Buffer m_scale(Device::cpu, DType::f32, scales.read()), v_scale(Device::cpu, DType::f32, scales.read());
    const Buffer bare(Device::cpu, DType::bf16, master.read());
    AdamW op{n,   DType::f32, 1e-3,         0.9,         0.95,          1e-8,         0.1,
             0.5, 7,          coded.data(), grad.data(), m_code.data(), v_code.data()};
    op.moments = Moments::int8;
    op.m_scale = static_cast<float*>(m_scale.data());
    op.v_scale = static_cast<float*>(v_scale.data());
    OOMB_RUN(adamw_step, op);
    op.master = nullptr;
    op.weight = bare.data();
    OOMB_RUN(adamw_step, op);
    for (const Buffer* b : {&coded, &m_scale, &v_scale, &bare}) results->push_back(b->read_bytes());
    results->push_back(m_code);
    results->push_back(v_code);
  }
  const Buffer norm(Device::cpu, DType::f64, {0.0});
  Bytes space(static_cast<size_t>(sum_of_squares_workspace_bytes(Queue{}, n)));
  OOMB_RUN(sum_of_squares, SumOfSquares{n, in.type, in.x.data(), static_cast<double*>(norm.data()), space.data()});
  for (const Buffer* b : {&master, &m, &v, &weight, &norm}) results->push_back(b->read_bytes());
}

void embeddings(const Inputs& in, bool baseline, std::vector<Bytes>* results) {
  std::vector<int64_t> ids, begin{0}, order;
  for (int64_t id = 0; id < 3; ++id) {
    for (int64_t i = id; i < in.rows; i += 3) order.push_back(i);
    ids.push_back(id);
    begin.push_back(static_cast<int64_t>(order.size()));
  }
  const Buffer table = in.acc(3 * in.width);
  OOMB_RUN(embedding_backward, EmbeddingBackward{3, in.width, 3, in.type, ids.data(), begin.data(), order.data(),
                                                 in.x.data(), table.data()});
  results->push_back(table.read_bytes());
}

std::vector<Bytes> all_ops(const Inputs& in, bool baseline) {
  std::vector<Bytes> results;
  norms(in, baseline, &results);
  activations(in, baseline, &results);
  losses(in, baseline, &results);
  optimizer(in, baseline, &results);
  embeddings(in, baseline, &results);
  return results;
}

const std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {3, 17}, {129, 1031}, {13, 5003}};

TEST(BitsTest, EqualOnAnyNumberOfThreads) {
#ifdef _OPENMP
  const int before = omp_get_max_threads();
  for (const DType type : kAllTypes) {
    for (const auto& [rows, width] : kShapes) {
      const Inputs in(type, rows, width);
      omp_set_num_threads(1);
      const std::vector<Bytes> alone = all_ops(in, false);
      for (const int threads : {2, 3, 5}) {
        omp_set_num_threads(threads);
        const std::vector<Bytes> together = all_ops(in, false);
        for (size_t i = 0; i < alone.size(); ++i) {
          EXPECT_TRUE(together[i] == alone[i])
              << name_of(type) << " " << rows << "x" << width << " result " << i << " on " << threads << " threads";
        }
      }
    }
  }
  omp_set_num_threads(before);
#else
  GTEST_SKIP() << "built without OpenMP: one thread only";
#endif
}

TEST(BitsTest, EqualWithAnyInstructionSet) {
  for (const DType type : kAllTypes) {
    for (const auto& [rows, width] : kShapes) {
      const Inputs in(type, rows, width);
      const std::vector<Bytes> library = all_ops(in, false), baseline = all_ops(in, true);
      for (size_t i = 0; i < library.size(); ++i) {
        EXPECT_TRUE(library[i] == baseline[i]) << name_of(type) << " " << rows << "x" << width << " result " << i;
      }
    }
  }
}

}  // namespace
}  // namespace oomb::kernels::testing
