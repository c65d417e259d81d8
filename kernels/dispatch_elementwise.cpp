// Public functions of the element-wise ops: what they refuse, then the device's own version.
#include <cmath>
#include <initializer_list>
#include <limits>

#include "kernels/blocks.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/dispatch.h"

namespace oomb::kernels {
namespace {

bool is_acc(DType type) { return type == DType::f32 || type == DType::f64; }

bool given(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers) {
    if (p == nullptr) return false;
  }
  return true;
}

/// May a * b elements be counted in 63 bits, with room for their bytes?
bool product_fits(int64_t a, int64_t b) { return a == 0 || b <= std::numeric_limits<int64_t>::max() / 16 / a; }

}  // namespace

Status rms_norm_forward(const Queue& queue, const RmsNormForward& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.hidden >= 1, "rms_norm_forward: num_rows >= 0 and hidden >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_rows, op.hidden), "rms_norm_forward: num_rows * hidden overflows");
  OOMB_KERNEL_REQUIRE(op.eps >= 0 && std::isfinite(op.eps), "rms_norm_forward: eps is finite and not negative");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.x, op.weight, op.y, op.inv_rms}), "rms_norm_forward: x, weight, y or inv_rms is null");
  OOMB_KERNEL_REQUIRE(op.delta == nullptr || op.sum != nullptr, "rms_norm_forward: delta is given but sum is null");
  return dispatch(queue, op, &cpu::rms_norm_forward, OOMB_CUDA_OP(rms_norm_forward));
}

int64_t rms_norm_backward_workspace_bytes(const Queue& queue, int64_t num_rows, int64_t hidden, DType dtype) {
  if (queue.device == Device::cpu || num_rows <= 0 || hidden <= 0) return 0;
  return cuda::rms_norm_partial_rows(num_rows) * hidden * size_of(accumulator_of(dtype));
}

Status rms_norm_backward(const Queue& queue, const RmsNormBackward& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.hidden >= 1, "rms_norm_backward: num_rows >= 0 and hidden >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_rows, op.hidden), "rms_norm_backward: num_rows * hidden overflows");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.dy, op.x, op.weight, op.inv_rms, op.dx, op.dweight}),
                      "rms_norm_backward: dy, x, weight, inv_rms, dx or dweight is null");
  OOMB_KERNEL_REQUIRE(op.workspace != nullptr || queue.device == Device::cpu,
                      "rms_norm_backward: workspace is null, see rms_norm_backward_workspace_bytes");
  return dispatch(queue, op, &cpu::rms_norm_backward, OOMB_CUDA_OP(rms_norm_backward));
}

Status rope_table(const Queue& queue, const RopeTable& op) {
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0 && op.half_dim >= 1, "rope_table: num_tokens >= 0 and half_dim >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_tokens, op.half_dim), "rope_table: num_tokens * half_dim overflows");
  OOMB_KERNEL_REQUIRE(is_acc(op.acc), "rope_table: acc is f32 or f64");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.positions, op.inv_freq, op.cos, op.sin}), "rope_table: a pointer is null");
  return dispatch(queue, op, &cpu::rope_table, OOMB_CUDA_OP(rope_table));
}

Status rope_apply(const Queue& queue, const RopeApply& op) {
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0 && op.num_heads >= 1 && op.group >= 1,
                      "rope_apply: num_tokens >= 0, num_heads >= 1 and group >= 1");
  OOMB_KERNEL_REQUIRE(op.head_dim >= 2 && op.head_dim % 2 == 0, "rope_apply: head_dim is even");
  OOMB_KERNEL_REQUIRE(op.num_heads <= (int64_t{1} << 30) / op.head_dim, "rope_apply: num_heads * head_dim over 2^30");
  OOMB_KERNEL_REQUIRE((op.cos == nullptr) == (op.sin == nullptr), "rope_apply: cos and sin are null together or not");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.x, op.y}), "rope_apply: x or y is null");
  OOMB_KERNEL_REQUIRE(op.x != op.y || (op.x_token_stride == op.y_token_stride &&
                                       op.x_group_stride == op.y_group_stride && op.x_head_stride == op.y_head_stride),
                      "rope_apply: in place the strides of x and y are equal");
  return dispatch(queue, op, &cpu::rope_apply, OOMB_CUDA_OP(rope_apply));
}

Status swiglu_forward(const Queue& queue, const SwigluForward& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.width >= 1, "swiglu_forward: num_rows >= 0 and width >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_rows, op.width), "swiglu_forward: num_rows * width overflows");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.gate_up, op.y}), "swiglu_forward: gate_up or y is null");
  return dispatch(queue, op, &cpu::swiglu_forward, OOMB_CUDA_OP(swiglu_forward));
}

Status swiglu_backward(const Queue& queue, const SwigluBackward& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.width >= 1, "swiglu_backward: num_rows >= 0 and width >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_rows, op.width), "swiglu_backward: num_rows * width overflows");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.gate_up, op.dy, op.d_gate_up}), "swiglu_backward: gate_up, dy or d_gate_up is null");
  return dispatch(queue, op, &cpu::swiglu_backward, OOMB_CUDA_OP(swiglu_backward));
}

Status cross_entropy(const Queue& queue, const CrossEntropy& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.vocab >= 1, "cross_entropy: num_rows >= 0 and vocab >= 1");
  OOMB_KERNEL_REQUIRE(op.row_stride >= op.vocab, "cross_entropy: row_stride >= vocab");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_rows, op.row_stride), "cross_entropy: num_rows * row_stride overflows");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.logits, op.labels, op.loss}), "cross_entropy: logits, labels or loss is null");
  return dispatch(queue, op, &cpu::cross_entropy, OOMB_CUDA_OP(cross_entropy));
}

Status adamw_step(const Queue& queue, const AdamW& op) {
  OOMB_KERNEL_REQUIRE(op.num_elements >= 0 && op.step >= 1, "adamw_step: num_elements >= 0 and step >= 1");
  OOMB_KERNEL_REQUIRE(is_acc(op.acc), "adamw_step: acc is f32 or f64");
  OOMB_KERNEL_REQUIRE(op.beta1 >= 0 && op.beta1 < 1 && op.beta2 >= 0 && op.beta2 < 1,
                      "adamw_step: betas are in [0, 1)");
  OOMB_KERNEL_REQUIRE(std::isfinite(op.lr) && std::isfinite(op.grad_scale) && std::isfinite(op.weight_decay),
                      "adamw_step: lr, grad_scale or weight_decay is not finite");
  OOMB_KERNEL_REQUIRE(op.weight == nullptr || op.weight_dtype == op.acc ||
                          (op.acc == DType::f64 && op.weight_dtype == DType::f32) ||
                          (op.acc == DType::f32 && op.weight_dtype == DType::bf16),
                      "adamw_step: weight_dtype is acc, or f32 of f64, or bf16 of f32");
  if (op.num_elements == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.grad, op.m, op.v}), "adamw_step: grad, m or v is null");
  if (op.master == nullptr || op.moments == Moments::int8) {
    OOMB_KERNEL_REQUIRE(op.acc == DType::f32, "adamw_step: without a master or with int8 moments, acc is f32");
    OOMB_KERNEL_REQUIRE(op.first_element >= 0 && op.first_element % kMomentBlock == 0,
                        "adamw_step: first_element is a multiple of kMomentBlock");
  }
  OOMB_KERNEL_REQUIRE(op.master != nullptr || (op.weight != nullptr && op.weight_dtype == DType::bf16),
                      "adamw_step: master is null and so is weight, or it is not bf16");
  OOMB_KERNEL_REQUIRE(op.moments == Moments::acc || given({op.m_scale, op.v_scale}),
                      "adamw_step: m_scale or v_scale is null");
  return dispatch(queue, op, &cpu::adamw_step, OOMB_CUDA_OP(adamw_step));
}

int64_t sum_of_squares_workspace_bytes(const Queue&, int64_t num_elements) {
  return num_elements > 0 ? num_sum_blocks(num_elements) * static_cast<int64_t>(sizeof(double)) : 0;
}

Status sum_of_squares(const Queue& queue, const SumOfSquares& op) {
  OOMB_KERNEL_REQUIRE(op.num_elements >= 0, "sum_of_squares: num_elements >= 0");
  if (op.num_elements == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.values, op.out, op.workspace}), "sum_of_squares: values, out or workspace is null");
  return dispatch(queue, op, &cpu::sum_of_squares, OOMB_CUDA_OP(sum_of_squares));
}

Status embedding_forward(const Queue& queue, const EmbeddingForward& op) {
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0 && op.hidden >= 1 && op.vocab >= 1,
                      "embedding_forward: num_tokens >= 0, hidden >= 1 and vocab >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.num_tokens, op.hidden) && product_fits(op.vocab, op.hidden),
                      "embedding_forward: rows * hidden overflows");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.ids, op.table, op.y}), "embedding_forward: ids, table or y is null");
  return dispatch(queue, op, &cpu::embedding_forward, OOMB_CUDA_OP(embedding_forward));
}

Status embedding_backward(const Queue& queue, const EmbeddingBackward& op) {
  OOMB_KERNEL_REQUIRE(op.num_segments >= 0 && op.hidden >= 1 && op.vocab >= 1,
                      "embedding_backward: num_segments >= 0, hidden >= 1 and vocab >= 1");
  OOMB_KERNEL_REQUIRE(product_fits(op.vocab, op.hidden) && product_fits(op.num_segments, op.hidden),
                      "embedding_backward: rows * hidden overflows");
  if (op.num_segments == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.segment_ids, op.segment_begin, op.order, op.dy, op.dtable}),
                      "embedding_backward: a pointer is null");
  return dispatch(queue, op, &cpu::embedding_backward, OOMB_CUDA_OP(embedding_backward));
}

Status gemm_accumulate(const Queue& queue, const GemmAccumulate& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.out_features >= 1 && op.in_features >= 1,
                      "gemm_accumulate: num_rows >= 0, out_features >= 1 and in_features >= 1");
  OOMB_KERNEL_REQUIRE(op.dy_row_stride >= op.out_features && op.x_row_stride >= op.in_features,
                      "gemm_accumulate: dy_row_stride >= out_features and x_row_stride >= in_features");
  OOMB_KERNEL_REQUIRE(product_fits(op.out_features, op.in_features), "gemm_accumulate: dw overflows");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(given({op.dy, op.x, op.dw}), "gemm_accumulate: dy, x or dw is null");
  return dispatch(queue, op, &cpu::gemm_accumulate, OOMB_CUDA_OP(gemm_accumulate));
}

}  // namespace oomb::kernels
