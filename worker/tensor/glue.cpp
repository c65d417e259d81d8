#include "worker/tensor/glue.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>

#include "configs/error.h"
#include "kernels/gemm_accumulate.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#if OOMB_HAVE_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace oomb {

kernels::DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return kernels::DType::f64;
    case at::kFloat:
      return kernels::DType::f32;
    case at::kBFloat16:
      return kernels::DType::bf16;
    default:
      throw std::logic_error(std::string("no kernel dtype for ") + c10::toString(type));
  }
}

kernels::Queue queue_of(const at::Device& device) {
#if OOMB_HAVE_CUDA
  if (device.is_cuda()) {
    return {kernels::Device::cuda, c10::cuda::getCurrentCUDAStream(device.index()).stream()};
  }
#endif
  if (!device.is_cpu()) throw std::logic_error("no queue for device " + device.str());
  return {};
}

void check(const kernels::Status& status, const char* op) {
  if (!status) throw std::runtime_error(std::string(op) + ": " + status.what);
}

void initialise_device(const at::Device& device) {
  if (device.is_cpu()) return;
#if OOMB_HAVE_CUDA
  // Opened here rather than linked: a CPU run then never maps the GPU libraries. RTLD_GLOBAL so that the operators
  // register.
  static void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr)
    throw InputError(std::string("train.device: cuda: cannot load LibTorch's CUDA library: ") + dlerror());
  const int count = c10::cuda::device_count();
  if (device.index() >= count) {
    throw InputError("train.device: cuda: GPU " + std::to_string(device.index()) + " asked for, " +
                     std::to_string(count) + " found; use train.device: cpu or run where a GPU is");
  }
  c10::cuda::set_device(device.index());
#else
  throw InputError(
      "train.device: cuda: this build has no CUDA kernels; build with the CUDA toolkit or use train.device: cpu");
#endif
}

void synchronise(const at::Device& device) {
#if OOMB_HAVE_CUDA
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
#else
  static_cast<void>(device);  // work on a CPU is done when its call returns
#endif
}

void end_process(int status) {
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  _exit(status);
}

namespace {

template <typename T>
at::Tensor copy_to_device(const std::vector<T>& values, at::ScalarType type, const at::Device& device) {
  auto options = at::TensorOptions().dtype(type);
  if (device.is_cuda()) options = options.pinned_memory(true);
  at::Tensor host = at::empty({static_cast<int64_t>(values.size())}, options);
  if (!values.empty()) std::memcpy(host.data_ptr(), values.data(), values.size() * sizeof(T));
  return device.is_cuda() ? host.to(device, /*non_blocking=*/true) : host;
}

}  // namespace

at::Tensor to_device(const std::vector<int64_t>& values, const at::Device& device) {
  return copy_to_device(values, at::kLong, device);
}
at::Tensor to_device(const std::vector<int32_t>& values, const at::Device& device) {
  return copy_to_device(values, at::kInt, device);
}
at::Tensor to_device(const std::vector<uint8_t>& values, const at::Device& device) {
  return copy_to_device(values, at::kByte, device);
}
at::Tensor addresses_to_device(const std::vector<void*>& addresses, const at::Device& device) {
  static_assert(sizeof(void*) == sizeof(int64_t));
  return copy_to_device(addresses, at::kLong, device);
}

namespace {
constexpr int64_t kWorkspaceAlignment = 256;
}

Workspace::Workspace(int64_t bytes, const at::Device& device)
    : storage_(at::empty({bytes + kWorkspaceAlignment}, at::TensorOptions().dtype(at::kByte).device(device))) {}

void* Workspace::data() const {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data_ptr());
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
}

at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::addmm(bias, x, weight.t()) : at::mm(x, weight.t());
}

void accumulate_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dw) {
  if (dy.is_cpu()) {
    // BLAS adds straight into dw when the types agree; bf16 inputs are widened first, so the sum over chunks is in acc.
    dw.addmm_(dy.to(dw.scalar_type()).t(), x.to(dw.scalar_type()));
    return;
  }
  kernels::GemmAccumulate op;
  op.num_rows = dy.size(0);
  op.out_features = dy.size(1);
  op.in_features = x.size(1);
  op.dtype = dtype_of(dy);
  op.dy = dy.data_ptr();
  op.dy_row_stride = dy.stride(0);
  op.x = x.data_ptr();
  op.x_row_stride = x.stride(0);
  op.dw = dw.data_ptr();
  check(kernels::gemm_accumulate(queue_of(dy), op), "gemm_accumulate");
}

void accumulate_bias_gradient(const at::Tensor& dy, at::Tensor& db) {
  db.add_(at::sum(dy, {0}, false, db.scalar_type()));
}

NormOutput rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  NormOutput out;
  kernels::RmsNormForward op;
  op.num_rows = x.size(0);
  op.hidden = x.size(1);
  op.dtype = dtype_of(x);
  op.eps = eps;
  op.x = x.data_ptr();
  op.weight = weight.data_ptr();
  out.sum = x;
  if (delta.defined()) {
    out.sum = at::empty_like(x);
    op.delta = delta.data_ptr();
    op.sum = out.sum.data_ptr();
  }
  out.y = at::empty_like(x);
  out.inv_rms = at::empty({x.size(0)}, x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  op.y = out.y.data_ptr();
  op.inv_rms = out.inv_rms.data_ptr();
  check(kernels::rms_norm_forward(queue_of(x), op), "rms_norm_forward");
  return out;
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& inv_rms, const at::Tensor& d_residual, at::Tensor& dweight) {
  const auto queue = queue_of(x);
  at::Tensor dx = at::empty_like(x);
  const Workspace workspace(kernels::rms_norm_backward_workspace_bytes(queue, x.size(0), x.size(1), dtype_of(x)),
                            x.device());
  kernels::RmsNormBackward op;
  op.num_rows = x.size(0);
  op.hidden = x.size(1);
  op.dtype = dtype_of(x);
  op.dy = dy.data_ptr();
  op.x = x.data_ptr();
  op.weight = weight.data_ptr();
  op.inv_rms = inv_rms.data_ptr();
  op.d_residual = d_residual.defined() ? d_residual.data_ptr() : nullptr;
  op.dx = dx.data_ptr();
  op.dweight = dweight.data_ptr();
  op.workspace = workspace.data();
  check(kernels::rms_norm_backward(queue, op), "rms_norm_backward");
  return dx;
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  at::Tensor y = at::empty({gate_up.size(0), width}, gate_up.options());
  kernels::SwigluForward op;
  op.num_rows = gate_up.size(0);
  op.width = width;
  op.dtype = dtype_of(gate_up);
  op.gate_up = gate_up.data_ptr();
  op.y = y.data_ptr();
  check(kernels::swiglu_forward(queue_of(gate_up), op), "swiglu_forward");
  return y;
}

std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& gate_up, const at::Tensor& dy) {
  at::Tensor d_gate_up = at::empty_like(gate_up);
  at::Tensor y = at::empty_like(dy);
  kernels::SwigluBackward op;
  op.num_rows = dy.size(0);
  op.width = dy.size(1);
  op.dtype = dtype_of(dy);
  op.gate_up = gate_up.data_ptr();
  op.dy = dy.data_ptr();
  op.d_gate_up = d_gate_up.data_ptr();
  op.y = y.data_ptr();
  check(kernels::swiglu_backward(queue_of(dy), op), "swiglu_backward");
  return {d_gate_up, y};
}

RopeTables rope_tables(const at::Tensor& positions, const at::Tensor& inv_freq, at::ScalarType acc, double scale) {
  RopeTables out;
  const auto options = positions.options().dtype(acc);
  out.cos = at::empty({positions.size(0), inv_freq.size(0)}, options);
  out.sin = at::empty_like(out.cos);
  kernels::RopeTable op;
  op.num_tokens = positions.size(0);
  op.half_dim = inv_freq.size(0);
  op.acc = dtype_of(acc);
  op.scale = scale;
  op.positions = positions.data_ptr<int64_t>();
  op.inv_freq = inv_freq.data_ptr<double>();
  op.cos = out.cos.data_ptr();
  op.sin = out.sin.data_ptr();
  check(kernels::rope_table(queue_of(positions), op), "rope_table");
  return out;
}

namespace {

kernels::RopeApply rope_of(int64_t tokens, int64_t kv_heads, int64_t group, int64_t head_dim,
                           const RopeTables* tables) {
  kernels::RopeApply op;
  op.num_tokens = tokens;
  op.num_heads = kv_heads * group;
  op.head_dim = head_dim;
  op.group = group;
  if (tables != nullptr) {
    op.cos = tables->cos.data_ptr();
    op.sin = tables->sin.data_ptr();
  }
  return op;
}

}  // namespace

at::Tensor heads_from_rows(const at::Tensor& x, int64_t column, int64_t kv_heads, int64_t group, int64_t head_dim,
                           const RopeTables* tables) {
  const int64_t tokens = x.size(0);
  at::Tensor y = at::empty({kv_heads, tokens, group, head_dim}, x.options());
  kernels::RopeApply op = rope_of(tokens, kv_heads, group, head_dim, tables);
  op.dtype = dtype_of(x);
  op.x = static_cast<const char*>(x.data_ptr()) + column * x.element_size();
  op.x_token_stride = x.stride(0);
  op.x_group_stride = group * head_dim;
  op.x_head_stride = head_dim;
  op.y = y.data_ptr();
  op.y_token_stride = y.stride(1);
  op.y_group_stride = y.stride(0);
  op.y_head_stride = y.stride(2);
  check(kernels::rope_apply(queue_of(x), op), "rope_apply");
  return y;
}

void heads_to_rows(const at::Tensor& dy, const RopeTables* tables, at::Tensor& dx, int64_t column) {
  const int64_t kv_heads = dy.size(0), tokens = dy.size(1), group = dy.size(2), head_dim = dy.size(3);
  kernels::RopeApply op = rope_of(tokens, kv_heads, group, head_dim, tables);
  op.dtype = dtype_of(dy);
  op.inverse = true;
  op.x = dy.data_ptr();
  op.x_token_stride = dy.stride(1);
  op.x_group_stride = dy.stride(0);
  op.x_head_stride = dy.stride(2);
  op.y = static_cast<char*>(dx.data_ptr()) + column * dx.element_size();
  op.y_token_stride = dx.stride(0);
  op.y_group_stride = group * head_dim;
  op.y_head_stride = head_dim;
  check(kernels::rope_apply(queue_of(dy), op), "rope_apply");
}

}  // namespace oomb
