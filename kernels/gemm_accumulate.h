// Weight gradient of a linear layer, accumulated: dw += dy^T x, summed over the rows of a chunk.
// On CUDA one cublasGemmEx with the accumulator as output and beta = 1, so no separate addition passes over memory.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct GemmAccumulate {
  int64_t num_rows = 0, out_features = 0, in_features = 0;
  DType dtype = DType::f32;  ///< of dy and x
  const void* dy = nullptr;  ///< [num_rows, out_features], rows dy_row_stride apart
  int64_t dy_row_stride = 0;
  const void* x = nullptr;  ///< [num_rows, in_features], rows x_row_stride apart
  int64_t x_row_stride = 0;
  void* dw = nullptr;  ///< acc [out_features, in_features], added to
};
Status gemm_accumulate(const Queue& queue, const GemmAccumulate& op);

}  // namespace oomb::kernels
