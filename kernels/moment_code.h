// The 8-bit code of AdamW's moments and the rounding of bf16 weights, shared by both devices because they fix the bits.
//
// A block of kMomentBlock elements shares one scale, a power of two. A magnitude is a code c:
//   0 for c = 0,  scale * (1 + ((c - 1) mod 8) / 8) * 2^floor((c - 1) / 8) for c >= 1
// that is a float with 3 bits of mantissa whose exponents are counted from the block's smallest. m has a sign bit and c
// in [0, 127]: 15.9 octaves. v has c in [0, 255]: 31.9 octaves, the same span once the root is taken. The scale is the
// smallest power of two under which the block's largest magnitude still has a code above or at it.
//
// Why this and not a table such as the dynamic map of Dettmers et al. (arXiv 2110.02861):
// - Neighbours differ by 1/8 to 1/15 of the value in every octave, so the relative error is below 1/8 for m and v,
// below
//   1/16 for sqrt(v), however small an element is beside the block's largest. Maps with a fixed number of codes per
//   decade or a linear part lose relative precision there, and Adam divides by it.
// - The scale is a power of two, so a value on the grid stays on it whatever happens to the block's largest.
// - Coding is a few integer operations on the bits of a float: no table, no search.
//
// Rounding is stochastic: the expected value of a stored moment is the moment. With rounding to nearest a moment sticks
// as soon as one step changes it by less than half a code, and 1 - beta2 is far below the 1/16 that this would take. v
// is the exception below `scale`: there every positive v becomes code 1, upwards, because m / sqrt(0) would explode
// where m / sqrt(scale) is merely too small.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/philox.h"

namespace oomb::kernels {

/// Elements that share a scale.
inline constexpr int kMomentBlock = 256;
/// Binades that the codes of a block reach: m with 7 bits of magnitude, v with 8.
inline constexpr uint32_t kBinadesM = 16, kBinadesV = 32;

constexpr int64_t num_moment_blocks(int64_t num_elements) { return (num_elements + kMomentBlock - 1) / kMomentBlock; }

inline constexpr uint32_t kOneBits = 0x3f800000u;  ///< of 1.0f
inline constexpr uint32_t kMagnitudeBits = 0x7fffffffu;

/// Random words of elements 4 * group .. 4 * group + 3: the low half rounds the weight, the high half both moments.
[[gnu::always_inline]] constexpr std::array<uint32_t, 4> rounding_words(uint64_t key, int64_t step, int64_t group) {
  const auto s = static_cast<uint64_t>(step), g = static_cast<uint64_t>(group);
  return philox4x32({static_cast<uint32_t>(g), static_cast<uint32_t>(g >> 32), static_cast<uint32_t>(s),
                     static_cast<uint32_t>(s >> 32)},
                    {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
}

/// Bits of the scale for a block whose largest magnitude has the bits `largest`. NaN, which every element then reads
/// as, if that is not finite or above 1.75 * 2^127.
[[gnu::always_inline]] constexpr uint32_t moment_scale_bits(uint32_t largest, uint32_t binades) {
  // The top code of a window is 1.75 times its top binade: above it the next binade is needed.
  const uint32_t top = (largest + 0x1fffffu) >> 23;
  if (top > 254) return 0x7fc00000u;
  return (top >= binades ? top - (binades - 1) : 1u) << 23;
}

/// 1 / scale.
[[gnu::always_inline]] constexpr float inverse_scale(uint32_t scale_bits) {
  return std::bit_cast<float>((254u << 23) - scale_bits);
}

/// Code of a magnitude x >= 0 of the block, rounded up with the probability that keeps the expected value (to 2^-17 of
/// a step). `random` has 16 bits.
[[gnu::always_inline]] constexpr uint32_t encode_magnitude(float x, float inverse, uint32_t random) {
  const float y = x * inverse;
  const uint32_t bits = std::bit_cast<uint32_t>(y);
  // u in (0, 1) with the same half unit as `above` adds: rounding with u must not be biased by its resolution.
  const float u = std::bit_cast<float>(kOneBits | (random << 7) | 64u) - 1.0f;
  const uint32_t below = y + u >= 1.0f ? 1u : 0u;
  const uint32_t above = ((bits - kOneBits + ((random << 4) | 8u)) >> 20) + 1u;
  return bits >= kOneBits ? above : below;
}

[[gnu::always_inline]] constexpr float decode_magnitude(uint32_t code, float scale) {
  const float value = std::bit_cast<float>(kOneBits + ((code - 1u) << 20));
  return (code == 0 ? 0.0f : value) * scale;
}

[[gnu::always_inline]] constexpr uint8_t encode_m(float m, float inverse, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(m);
  const uint32_t code = encode_magnitude(std::bit_cast<float>(bits & kMagnitudeBits), inverse, random);
  return static_cast<uint8_t>(code | ((bits >> 31) << 7));
}

[[gnu::always_inline]] constexpr float decode_m(uint8_t code, float scale) {
  const float magnitude = decode_magnitude(code & 0x7fu, scale);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (static_cast<uint32_t>(code & 0x80u) << 24));
}

[[gnu::always_inline]] constexpr uint8_t encode_v(float v, float inverse, uint32_t random) {
  const uint32_t code = encode_magnitude(v, inverse, random);
  return static_cast<uint8_t>(code == 0 && v > 0.0f ? 1u : code);
}

[[gnu::always_inline]] constexpr float decode_v(uint8_t code, float scale) { return decode_magnitude(code, scale); }

/// bf16 bits of x: up or down with the probability that makes the expected value x, exactly (16 bits are dropped and
/// `random` has 16). Past the largest bf16 it truncates, so no finite value becomes infinite; NaN stays NaN.
[[gnu::always_inline]] constexpr uint16_t stochastic_bf16_bits(float x, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & kMagnitudeBits;
  const uint32_t rounded = (bits + (magnitude >= 0x7f7f0000u ? 0u : random)) >> 16;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? rounded | 0x40u : rounded);
}

}  // namespace oomb::kernels
