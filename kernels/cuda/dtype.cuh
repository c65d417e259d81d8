// Element types on CUDA: conversion to and from acc, 16-byte packs, and from a DType to a template parameter.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "kernels/dispatch.h"
#include "kernels/types.h"

namespace oomb::kernels::cuda {

using bf16 = __nv_bfloat16;

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

__device__ inline double load(double x) { return x; }
__device__ inline float load(float x) { return x; }
__device__ inline float load(bf16 x) { return __bfloat162float(x); }

/// From acc to an element, to nearest even: store<T>(x).
template <class T>
__device__ inline T store(acc_t<T> x) {
  return x;
}
template <>
__device__ inline bf16 store<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

/// N elements moved as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

/// Raw words of a transfer of `Bytes` bytes: the widest access that divides it, at most 16 bytes.
template <int Bytes>
struct Words {
  using type = uint4;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<4> {
  using type = uint32_t;
};
template <>
struct Words<2> {
  using type = uint16_t;
};

/// N elements from p, which is aligned to min(16, N * sizeof(T)) bytes.
template <int N, class T>
__device__ inline Pack<T, N> load_vec(const T* p) {
  using Word = typename Words<sizeof(T) * N>::type;
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i) {
    const Word word = reinterpret_cast<const Word*>(p)[i];
    memcpy(reinterpret_cast<char*>(&pack) + i * sizeof(Word), &word, sizeof(Word));
  }
  return pack;
}

template <class T, int N>
__device__ inline void store_vec(T* p, const Pack<T, N>& pack) {
  using Word = typename Words<sizeof(T) * N>::type;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i) {
    Word word;
    memcpy(&word, reinterpret_cast<const char*>(&pack) + i * sizeof(Word), sizeof(Word));
    reinterpret_cast<Word*>(p)[i] = word;
  }
}

/// Elements in 16 bytes.
template <class T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

/// Bytes-per-access check of the host side: may pointers be read as packs of 16 bytes?
template <class... P>
bool aligned16(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
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

}  // namespace oomb::kernels::cuda
