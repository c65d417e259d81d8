// Merging attention over two disjoint key sets, and the row statistic of its backward.
//   lse = log(exp(lse_a) + exp(lse_b)),   O = exp(lse_a - lse) O_a + exp(lse_b - lse) O_b
// A row without keys in a set has lse = -inf there and its O is not read (it may hold anything). Without keys in both:
// O = 0, lse = -inf. Arithmetic in acc. Dao et al., "FlashAttention" (arXiv 2205.14135), section on partial softmax.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

/// Rows are (h, c, g): KV head, token, head in group. o is [Hkv, C, G, D] and lse is [Hkv, C, G] for sets a and b.
struct LseMerge {
  int64_t kv_heads = 0, num_tokens = 0, group = 1, head_dim = 0;
  DType a_dtype = DType::f32;    ///< of o_a; a running merge over many sets keeps it, and out, in acc
  DType b_dtype = DType::f32;    ///< of o_b
  DType out_dtype = DType::f32;  ///< of out
  DType acc = DType::f32;        ///< of lse_a, lse_b, lse: f64 if any of the above is f64, else f32
  const void* o_a = nullptr;
  const void* lse_a = nullptr;  ///< acc
  const void* o_b = nullptr;    ///< null together with lse_b: set b is empty
  const void* lse_b = nullptr;  ///< acc
  void* out = nullptr;          ///< [C, Hkv * G, D] (the projection's layout) if token_major, else [Hkv, C, G, D];
                                ///< may be o_a if the layouts and types are equal
  bool token_major = false;
  void* lse = nullptr;  ///< acc [Hkv, C, G]; may be lse_a
};
Status lse_merge(const Queue& queue, const LseMerge& op);

}  // namespace oomb::kernels
