// Loops that the compiler turns into vector code, with one result for every instruction set.
//
// OOMB_CLONES compiles a function for the baseline, AVX2 and AVX-512; the loader picks the one the node has, so a
// binary never meets an illegal instruction. Sums are kept in kLanes fixed partial sums and folded in a fixed order,
// and contraction to FMA is off for these files: all versions give the same bits.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cpu/dtype.h"

// Loader-time selection runs before a sanitizer's runtime is ready, and only exists for GNU compilers on x86-64 ELF.
// OOMB_BASELINE_ONLY is for the test that compares the versions.
#if !defined(OOMB_BASELINE_ONLY) && defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && \
    !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__OPTIMIZE__)
#define OOMB_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define OOMB_CLONES
#endif
#define OOMB_INLINE inline __attribute__((always_inline))

namespace oomb::kernels::cpu {

inline constexpr int kLanes = 16;

/// Folds lanes in a fixed tree.
template <class A>
OOMB_INLINE A fold(A* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

/// Sum over j in [0, n) of term(j), term j in lane j % kLanes.
template <class A, class Term>
OOMB_INLINE A lane_sum(int64_t n, const Term& term) {
  A lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += term(j + i);
  }
  for (int i = 0; j + i < n; ++i) lanes[i] += term(j + i);
  return fold(lanes);
}

/// exp in double: the C library's.
OOMB_INLINE double exp_acc(double x) { return __builtin_exp(x); }

/// exp in float without a branch or a call, so that loops over it vectorise: x = n ln 2 + r with |r| <= ln 2 / 2, and a
/// polynomial in r. Error below 2 units in the last place; below -87.3 the result is 0 or has lost the denormal bits;
/// +inf above 88.73; NaN stays NaN.
OOMB_INLINE float exp_acc(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;   // High has 9 bits: n * High is exact
  constexpr float kShift = 12582912.0f;                                 // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -88.0f ? -88.0f : (x > 89.0f ? 89.0f : x);  // a NaN passes
  const float n = (clamped * kLog2e + kShift) - kShift;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  // Taylor coefficients to degree 7: the remainder at ln 2 / 2 is 2^-27 of the result.
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  const float tail = p * (r * r) + r;
  // 2^n in two factors, since n = 128 and n < -126 leave the exponent range of one.
  const int32_t whole = static_cast<int32_t>(n == n ? n : 0.0f);
  const int32_t half = whole >> 1;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((whole - half + 127) << 23);
  const float value = (tail + 1.0f) * scale_a * scale_b;
  return x < -88.0f ? 0.0f : value;
}

}  // namespace oomb::kernels::cpu
