// Element types on the CPU: bf16 conversion, and from a DType to a template parameter.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/types.h"

namespace oomb::kernels::cpu {

/// The upper 16 bits of an IEEE float.
struct bf16 {
  uint16_t bits;
};

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
/// float for f32 and bf16, double for f64.
template <class T>
using acc_t = typename AccOf<T>::type;

inline double load(double x) { return x; }
inline float load(float x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

/// Rounds to nearest, ties to even; a NaN stays a NaN (its payload's low bits could otherwise round to infinity).
inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

/// From acc to an element: store<T>(x).
template <class T>
inline T store(acc_t<T> x) {
  return x;
}
template <>
inline bf16 store<bf16>(float x) {
  return to_bf16(x);
}

/// Calls fn(T{}) with T = double, float or bf16. fn returns a Status.
template <class Fn>
Status with_type(DType type, const Fn& fn) {
  switch (type) {
    case DType::f64:
      return fn(double{});
    case DType::f32:
      return fn(float{});
    case DType::bf16:
      return fn(bf16{});
  }
  return invalid("unknown element type");
}

/// The same for accumulators: T = double or float.
template <class Fn>
Status with_acc(DType type, const Fn& fn) {
  switch (type) {
    case DType::f64:
      return fn(double{});
    case DType::f32:
      return fn(float{});
    case DType::bf16:
      break;
  }
  return invalid("an accumulator is f32 or f64");
}

}  // namespace oomb::kernels::cpu
