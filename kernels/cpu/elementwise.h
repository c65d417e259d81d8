// CPU references of the element-wise ops, behind the public functions of their headers. Arguments were validated there.
#pragma once

#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gemm_accumulate.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"

namespace oomb::kernels::cpu {

Status rms_norm_forward(const RmsNormForward& op);
Status rms_norm_backward(const RmsNormBackward& op);
Status rope_table(const RopeTable& op);
Status rope_apply(const RopeApply& op);
Status swiglu_forward(const SwigluForward& op);
Status swiglu_backward(const SwigluBackward& op);
Status cross_entropy(const CrossEntropy& op);
Status adamw_step(const AdamW& op);
Status sum_of_squares(const SumOfSquares& op);
Status embedding_forward(const EmbeddingForward& op);
Status embedding_backward(const EmbeddingBackward& op);
Status gemm_accumulate(const GemmAccumulate& op);

}  // namespace oomb::kernels::cpu
