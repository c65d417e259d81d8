// cuBLAS with beta = 1. One handle per (device, stream), each with its own workspace, so that calls on two streams do
// not share scratch memory and every call takes the same algorithm. Handles live until the process ends: destroying
// them in a static destructor would meet a runtime that is already gone.
#include "kernels/gemm_accumulate.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch.h"
#include "kernels/dispatch.h"

namespace oomb::kernels::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS documents for Hopper

Status checked(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {Code::launch_failed, cublasGetStatusString(status)};
}

struct Handles {
  std::mutex mutex;
  std::map<std::pair<int, cudaStream_t>, cublasHandle_t> by_stream;
};

Handles& handles() {
  static Handles* all = new Handles;
  return *all;
}

/// The handle for the current device and `stream`. The caller holds the mutex.
Status handle_for(Handles& all, cudaStream_t stream, cublasHandle_t* handle) {
  int device = 0;
  if (Status s = cuda::checked(cudaGetDevice(&device)); !s) return s;
  const auto found = all.by_stream.find({device, stream});
  if (found != all.by_stream.end()) {
    *handle = found->second;
    return kOk;
  }
  void* workspace = nullptr;
  if (Status s = cuda::checked(cudaMalloc(&workspace, kWorkspaceBytes)); !s) return s;
  Status status = checked(cublasCreate(handle));
  if (status) {
    status = checked(cublasSetStream(*handle, stream));
    // After the stream: setting a stream puts the library's own workspace back.
    if (status) status = checked(cublasSetWorkspace(*handle, workspace, kWorkspaceBytes));
    if (!status) cublasDestroy(*handle);
  }
  if (!status) {
    cudaFree(workspace);
    return status;
  }
  all.by_stream.emplace(std::pair{device, stream}, *handle);
  return kOk;
}

}  // namespace

Status gemm_accumulate(void* stream, const GemmAccumulate& op) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  cublasHandle_t handle = nullptr;
  if (Status s = handle_for(all, stream_of(stream), &handle); !s) return s;
  // cuBLAS counts columns first: row-major dw [out, in] is its [in, out], and dw^T = x^T dy.
  const auto gemm = [&](cudaDataType in, cudaDataType out, cublasComputeType_t compute, const void* one) {
    return checked(cublasGemmEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_T, op.in_features, op.out_features, op.num_rows, one,
                                   op.x, in, op.x_row_stride, op.dy, in, op.dy_row_stride, one, op.dw, out,
                                   op.in_features, compute, CUBLAS_GEMM_DEFAULT));
  };
  const float one = 1;
  const double one_f64 = 1;
  switch (op.dtype) {
    case DType::f64:
      return gemm(CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, &one_f64);
    case DType::f32:
      return gemm(CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one);
    case DType::bf16:
      return gemm(CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, &one);
  }
  return invalid("unknown element type");
}

}  // namespace oomb::kernels::cuda
