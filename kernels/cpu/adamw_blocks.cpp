#include "kernels/cpu/adamw_blocks.h"

#include "kernels/cpu/adamw_update.h"
#include "kernels/cpu/dtype.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

/// A block in fp32. Only the first n elements are looked at.
struct Block {
  alignas(64) float w[kMomentBlock], m[kMomentBlock], v[kMomentBlock];
  alignas(64) uint32_t random[kMomentBlock];
};

OOMB_CLONES void draw(uint64_t key, int64_t step, int64_t first_element, uint32_t* __restrict random) {
  for (int64_t j = 0; j < kMomentBlock / 4; ++j) {
    const auto words = rounding_words(key, step, first_element / 4 + j);
    for (int64_t i = 0; i < 4; ++i) random[4 * j + i] = words[static_cast<size_t>(i)];
  }
}

OOMB_CLONES void decode_moments(int64_t n, const uint8_t* __restrict m, float m_scale, const uint8_t* __restrict v,
                                float v_scale, Block* __restrict block) {
  for (int64_t i = 0; i < n; ++i) block->m[i] = decode_m(m[i], m_scale);
  for (int64_t i = 0; i < n; ++i) block->v[i] = decode_v(v[i], v_scale);
}

/// Bits of the largest magnitude; those of a NaN are above all others.
OOMB_CLONES uint32_t largest_bits(int64_t n, const float* __restrict x) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & kMagnitudeBits;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

OOMB_CLONES void encode_moments(int64_t n, const Block& block, float m_inverse, uint8_t* __restrict m, float v_inverse,
                                uint8_t* __restrict v) {
  for (int64_t i = 0; i < n; ++i) m[i] = encode_m(block.m[i], m_inverse, block.random[i] >> 16);
  for (int64_t i = 0; i < n; ++i) v[i] = encode_v(block.v[i], v_inverse, block.random[i] >> 16);
}

OOMB_CLONES void update_block(int64_t n, const AdamWConstants<float>& constants, const float* __restrict grad,
                              float* __restrict w, float* __restrict m, float* __restrict v) {
  const AdamWConstants<float> c = constants;
  for (int64_t i = 0; i < n; ++i) w[i] = adamw_update(c, grad[i], w[i], &m[i], &v[i]);
}

OOMB_CLONES void load_weights(int64_t n, const bf16* __restrict weight, float* __restrict w) {
  for (int64_t i = 0; i < n; ++i) w[i] = load(weight[i]);
}

OOMB_CLONES void store_rounded_up_or_down(int64_t n, const float* __restrict w, const uint32_t* __restrict random,
                                          bf16* __restrict weight) {
  for (int64_t i = 0; i < n; ++i) weight[i] = {stochastic_bf16_bits(w[i], random[i] & 0xffffu)};
}

OOMB_CLONES void store_nearest(int64_t n, const float* __restrict w, bf16* __restrict weight) {
  for (int64_t i = 0; i < n; ++i) weight[i] = to_bf16(w[i]);
}

void step_block(const AdamW& op, const AdamWConstants<float>& constants, int64_t index, Block* block) {
  const int64_t at = index * kMomentBlock;
  const int64_t n = op.num_elements - at < kMomentBlock ? op.num_elements - at : kMomentBlock;
  const bool coded = op.moments == Moments::int8;
  uint8_t *m_code = static_cast<uint8_t*>(op.m) + at, *v_code = static_cast<uint8_t*>(op.v) + at;
  // Moments and masters that need no conversion are updated where they are.
  float* m = coded ? block->m : static_cast<float*>(op.m) + at;
  float* v = coded ? block->v : static_cast<float*>(op.v) + at;
  float* w = op.master == nullptr ? block->w : static_cast<float*>(op.master) + at;

  draw(op.random_key, op.step, op.first_element + at, block->random);
  if (coded) decode_moments(n, m_code, op.m_scale[index], v_code, op.v_scale[index], block);
  if (op.master == nullptr) load_weights(n, static_cast<const bf16*>(op.weight) + at, w);
  update_block(n, constants, static_cast<const float*>(op.grad) + at, w, m, v);
  if (coded) {
    const uint32_t m_bits = moment_scale_bits(largest_bits(n, m), kBinadesM);
    const uint32_t v_bits = moment_scale_bits(largest_bits(n, v), kBinadesV);
    encode_moments(n, *block, inverse_scale(m_bits), m_code, inverse_scale(v_bits), v_code);
    op.m_scale[index] = std::bit_cast<float>(m_bits);
    op.v_scale[index] = std::bit_cast<float>(v_bits);
  }
  if (op.master == nullptr) {
    store_rounded_up_or_down(n, w, block->random, static_cast<bf16*>(op.weight) + at);
  } else if (op.weight != nullptr && op.weight_dtype == DType::bf16) {
    store_nearest(n, w, static_cast<bf16*>(op.weight) + at);
  } else if (op.weight != nullptr) {
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(op.weight)[at + i] = w[i];
  }
}

}  // namespace

Status adamw_step_in_blocks(const AdamW& op) {
  const AdamWConstants<float> constants(op);
  parallel_for(0, num_moment_blocks(op.num_elements), grain_for(kMomentBlock), [&](int64_t first, int64_t last) {
    Block block;
    for (int64_t index = first; index < last; ++index) step_block(op, constants, index, &block);
  });
  return kOk;
}

}  // namespace oomb::kernels::cpu
