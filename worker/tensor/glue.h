// The one place where LibTorch tensors meet the ops of kernels/.
//
// Activations have the compute dtype (f64, f32 or bf16). Sums, statistics, weight gradients and optimizer states have
// the accumulator type ("acc"): f64 for f64, f32 for the others. All tensors of a worker live on one device. Every
// function runs on the current stream of its tensors' device and throws std::runtime_error when an op fails.
#pragma once

#include <ATen/ATen.h>

#include "kernels/types.h"

namespace oomb {

/// Compute type, accumulator type and device of a worker.
struct TensorTypes {
  at::ScalarType compute = at::kFloat;
  at::Device device = at::Device(at::kCPU);

  at::ScalarType acc() const { return compute == at::kDouble ? at::kDouble : at::kFloat; }
  at::TensorOptions compute_options() const { return at::TensorOptions().dtype(compute).device(device); }
  at::TensorOptions acc_options() const { return at::TensorOptions().dtype(acc()).device(device); }
  at::TensorOptions index_options() const { return at::TensorOptions().dtype(at::kLong).device(device); }
};

kernels::DType dtype_of(at::ScalarType type);
inline kernels::DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

/// The queue of `device`'s current stream.
kernels::Queue queue_of(const at::Device& device);
inline kernels::Queue queue_of(const at::Tensor& tensor) { return queue_of(tensor.device()); }

/// Throws std::runtime_error naming `op` unless the status is ok.
void check(const kernels::Status& status, const char* op);

/// Makes `device` usable and this thread's current one: loads LibTorch's CUDA library on first use. InputError if there
/// is no such GPU or no CUDA build.
void initialise_device(const at::Device& device);

/// Waits until everything enqueued on the device's current stream is done.
void synchronise(const at::Device& device);

/// Flushes the standard streams and ends the process without running static destructors: with a CUDA library opened at
/// run time, LibTorch's registries are torn down in an order that crashes.
[[noreturn]] void end_process(int status);

/// A device copy of host values. On CUDA the values pass through pinned memory, so the host does not wait.
at::Tensor to_device(const std::vector<int64_t>& values, const at::Device& device);
at::Tensor to_device(const std::vector<int32_t>& values, const at::Device& device);
at::Tensor to_device(const std::vector<uint8_t>& values, const at::Device& device);
/// Addresses as an int64 tensor that a kernel reads as an array of pointers.
at::Tensor addresses_to_device(const std::vector<void*>& addresses, const at::Device& device);

/// Scratch memory for one op: `bytes` of it, 256-byte aligned (LibTorch aligns to 64 on the CPU).
struct Workspace {
  Workspace(int64_t bytes, const at::Device& device);
  void* data() const;

 private:
  at::Tensor storage_;
};

/// y = x w^T (+ bias), [R, in] x [out, in] -> [R, out].
at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// dw += dy^T x and, if defined, db += column sums of dy; dw and db in acc.
void accumulate_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dw);
void accumulate_bias_gradient(const at::Tensor& dy, at::Tensor& db);

struct NormOutput {
  at::Tensor sum;      ///< x + delta (x itself without delta)
  at::Tensor y;        ///< normalised
  at::Tensor inv_rms;  ///< acc [R]
};
NormOutput rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);
/// Returns dx (+ d_residual); adds to dweight.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& inv_rms, const at::Tensor& d_residual, at::Tensor& dweight);

at::Tensor swiglu(const at::Tensor& gate_up);
/// Returns {d_gate_up, y}: y is the forward's output, recomputed on the way.
std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& gate_up, const at::Tensor& dy);

/// cos and sin, acc [C, D / 2].
struct RopeTables {
  at::Tensor cos, sin;
};
RopeTables rope_tables(const at::Tensor& positions, const at::Tensor& inv_freq, at::ScalarType acc, double scale = 1.0);

/// Heads of a projection's output x [C, row] starting at column `column` -> [Hkv, C, G, D], rotated if tables are
/// given.
at::Tensor heads_from_rows(const at::Tensor& x, int64_t column, int64_t kv_heads, int64_t group, int64_t head_dim,
                           const RopeTables* tables);
/// The transpose: dy [Hkv, C, G, D] -> columns of dx [C, row], rotated back if tables are given.
void heads_to_rows(const at::Tensor& dy, const RopeTables* tables, at::Tensor& dx, int64_t column);

}  // namespace oomb
