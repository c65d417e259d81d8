// CUDA kernels of the element-wise ops, behind the public functions of their headers. Arguments were validated there.
#pragma once

#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gemm_accumulate.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"

namespace oomb::kernels::cuda {

/// Rows of partial weight gradients that rms_norm_backward keeps in its workspace.
constexpr int64_t rms_norm_partial_rows(int64_t num_rows) { return num_rows < 512 ? num_rows : 512; }

Status rms_norm_forward(void* stream, const RmsNormForward& op);
Status rms_norm_backward(void* stream, const RmsNormBackward& op);
Status rope_table(void* stream, const RopeTable& op);
Status rope_apply(void* stream, const RopeApply& op);
Status swiglu_forward(void* stream, const SwigluForward& op);
Status swiglu_backward(void* stream, const SwigluBackward& op);
Status cross_entropy(void* stream, const CrossEntropy& op);
Status adamw_step(void* stream, const AdamW& op);
Status sum_of_squares(void* stream, const SumOfSquares& op);
Status embedding_forward(void* stream, const EmbeddingForward& op);
Status embedding_backward(void* stream, const EmbeddingBackward& op);
Status gemm_accumulate(void* stream, const GemmAccumulate& op);

}  // namespace oomb::kernels::cuda
