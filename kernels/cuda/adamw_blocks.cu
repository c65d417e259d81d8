// AdamW on blocks of kMomentBlock elements, a warp per block and 8 neighbouring elements per lane: codes move as 8
// bytes, bf16 weights as 16, fp32 as 2 x 16, and the block's maximum needs no shared memory. Compiled without
// contraction to FMA, as adamw.cu.
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/adamw_blocks.h"
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"

namespace oomb::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int kEach = kMomentBlock / kWarp;  // elements per lane
static_assert(kEach % 4 == 0, "a lane uses whole groups of four random words");

/// M: float or uint8_t codes. W: type of `weight`.
template <class M, class W>
struct Args {
  int64_t num_elements, first_element, step;
  uint64_t random_key;
  AdamWConstants<float> c;
  float* master;
  const float* grad;
  M *m, *v;
  float *m_scale, *v_scale;
  W* weight;
};

/// kEach elements from p, of which `count` exist; the others are 0.
template <bool Packed, class T>
__device__ inline Pack<T, kEach> load_some(const T* p, int count) {
  if (Packed && count == kEach) return load_vec<kEach>(p);
  Pack<T, kEach> pack;
#pragma unroll
  for (int i = 0; i < kEach; ++i) pack.v[i] = i < count ? p[i] : T(0);
  return pack;
}

template <bool Packed, class T>
__device__ inline void store_some(T* p, const Pack<T, kEach>& pack, int count) {
  if (Packed && count == kEach) {
    store_vec(p, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < count) p[i] = pack.v[i];
  }
}

/// Largest bits of |x| over the warp; those of a NaN are above all others.
__device__ inline uint32_t largest_bits(const float (&x)[kEach]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = max(largest, __float_as_uint(x[i]) & kMagnitudeBits);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  return largest;
}

template <bool Packed>
__device__ inline void load_moments(const Args<float, bf16>& op, int64_t at, int count, float (&m)[kEach],
                                    float (&v)[kEach]) {
  const auto from_m = load_some<Packed>(op.m + at, count), from_v = load_some<Packed>(op.v + at, count);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    m[i] = from_m.v[i];
    v[i] = from_v.v[i];
  }
}

template <bool Packed, class W>
__device__ inline void load_moments(const Args<uint8_t, W>& op, int64_t at, int count, float (&m)[kEach],
                                    float (&v)[kEach]) {
  const auto from_m = load_some<Packed>(op.m + at, count), from_v = load_some<Packed>(op.v + at, count);
  const float m_scale = op.m_scale[at / kMomentBlock], v_scale = op.v_scale[at / kMomentBlock];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    m[i] = decode_m(from_m.v[i], m_scale);
    v[i] = decode_v(from_v.v[i], v_scale);
  }
}

template <bool Packed>
__device__ inline void store_moments(const Args<float, bf16>& op, int64_t at, int count, const float (&m)[kEach],
                                     const float (&v)[kEach], const uint32_t (&)[kEach]) {
  Pack<float, kEach> to_m, to_v;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    to_m.v[i] = m[i];
    to_v.v[i] = v[i];
  }
  store_some<Packed>(op.m + at, to_m, count);
  store_some<Packed>(op.v + at, to_v, count);
}

template <bool Packed, class W>
__device__ inline void store_moments(const Args<uint8_t, W>& op, int64_t at, int count, const float (&m)[kEach],
                                     const float (&v)[kEach], const uint32_t (&random)[kEach]) {
  const uint32_t m_bits = moment_scale_bits(largest_bits(m), kBinadesM);
  const uint32_t v_bits = moment_scale_bits(largest_bits(v), kBinadesV);
  const float m_inverse = inverse_scale(m_bits), v_inverse = inverse_scale(v_bits);
  Pack<uint8_t, kEach> to_m, to_v;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    to_m.v[i] = encode_m(m[i], m_inverse, random[i] >> 16);
    to_v.v[i] = encode_v(v[i], v_inverse, random[i] >> 16);
  }
  store_some<Packed>(op.m + at, to_m, count);
  store_some<Packed>(op.v + at, to_v, count);
  if (at % kMomentBlock == 0) {
    op.m_scale[at / kMomentBlock] = __uint_as_float(m_bits);
    op.v_scale[at / kMomentBlock] = __uint_as_float(v_bits);
  }
}

template <class M, class W, bool Master, bool Packed>
__global__ void __launch_bounds__(kThreads) adamw_blocks_kernel(Args<M, W> op) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t at = block * kMomentBlock + (threadIdx.x % kWarp) * kEach;
  if (block * kMomentBlock >= op.num_elements) return;  // the whole warp or none of it
  const int64_t left = op.num_elements - at;
  const int count = left >= kEach ? kEach : (left > 0 ? static_cast<int>(left) : 0);

  const auto grad = load_some<Packed>(op.grad + at, count);
  float w[kEach], m[kEach], v[kEach];
  if constexpr (Master) {
    const auto master = load_some<Packed>(op.master + at, count);
#pragma unroll
    for (int i = 0; i < kEach; ++i) w[i] = master.v[i];
  } else {
    const auto weight = load_some<Packed>(op.weight + at, count);
#pragma unroll
    for (int i = 0; i < kEach; ++i) w[i] = load(weight.v[i]);
  }
  load_moments<Packed>(op, at, count, m, v);

  uint32_t random[kEach];
#pragma unroll
  for (int j = 0; j < kEach; j += 4) {
    const auto words = rounding_words(op.random_key, op.step, (op.first_element + at + j) / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) random[j + i] = words[i];
  }
  // Elements past the end have m = v = grad = 0 and are not stored.
#pragma unroll
  for (int i = 0; i < kEach; ++i) w[i] = adamw_update(op.c, grad.v[i], w[i], m[i], v[i]);
  store_moments<Packed>(op, at, count, m, v, random);

  Pack<W, kEach> weight;
  if constexpr (Master) {
    Pack<float, kEach> master;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      master.v[i] = w[i];
      weight.v[i] = store<W>(w[i]);
    }
    store_some<Packed>(op.master + at, master, count);
    if (op.weight != nullptr) store_some<Packed>(op.weight + at, weight, count);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      weight.v[i] = __ushort_as_bfloat16(stochastic_bf16_bits(w[i], random[i] & 0xffffu));
    }
    store_some<Packed>(op.weight + at, weight, count);
  }
}

template <class M, class W, bool Master>
Status launch(const AdamW& args, cudaStream_t stream) {
  const Args<M, W> op{args.num_elements,
                      args.first_element,
                      args.step,
                      args.random_key,
                      AdamWConstants<float>(args),
                      static_cast<float*>(args.master),
                      static_cast<const float*>(args.grad),
                      static_cast<M*>(args.m),
                      static_cast<M*>(args.v),
                      args.m_scale,
                      args.v_scale,
                      static_cast<W*>(args.weight)};
  const int64_t blocks = ceil_div(op.num_elements, int64_t{kMomentBlock} * (kThreads / kWarp));
  if (blocks > kMaxBlocks) return invalid("adamw_step: too many elements for one grid");
  if (aligned16(op.master, op.grad, op.m, op.v, op.weight)) {
    adamw_blocks_kernel<M, W, Master, true><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op);
  } else {
    adamw_blocks_kernel<M, W, Master, false><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op);
  }
  return launched();
}

}  // namespace

Status adamw_step_in_blocks(void* queue_stream, const AdamW& op) {
  const cudaStream_t stream = stream_of(queue_stream);
  if (op.moments == Moments::acc) return launch<float, bf16, false>(op, stream);
  if (op.master == nullptr) return launch<uint8_t, bf16, false>(op, stream);
  return op.weight_dtype == DType::bf16 ? launch<uint8_t, bf16, true>(op, stream)
                                        : launch<uint8_t, float, true>(op, stream);
}

}  // namespace oomb::kernels::cuda
