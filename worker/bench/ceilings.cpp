#include "worker/bench/ceilings.h"

#include <nlohmann/json.hpp>

#include "worker/bench/statistics.h"

namespace oomb::bench {

namespace {
// Far larger than any cache, and products large enough to fill the device; a CPU gets what takes it tens of
// milliseconds.
constexpr int64_t kGpuCopyBytes = int64_t{1} << 30, kCpuCopyBytes = int64_t{64} << 20;
constexpr int64_t kGpuGemmSize = 8192, kCpuGemmSize = 1024;
}  // namespace

nlohmann::json Ceilings::json() const {
  return {{"copy_bytes", copy_bytes},
          {"copy_bytes_per_second", copy_rate},
          {"gemm_size", gemm_size},
          {"gemm_flops_per_second", gemm_rate}};
}

Ceilings measure_ceilings(const TensorTypes& types, const Timer& timer, const Repeats& repeats) {
  const bool gpu = types.device.is_cuda();
  Ceilings out;
  {
    out.copy_bytes = gpu ? kGpuCopyBytes : kCpuCopyBytes;
    const at::Tensor from = at::ones({out.copy_bytes}, at::TensorOptions().dtype(at::kByte).device(types.device));
    at::Tensor to = at::empty_like(from);
    out.copy_rate = 2.0 * static_cast<double>(out.copy_bytes) / median(timer.time(repeats, [&] { to.copy_(from); }));
  }
  out.gemm_size = gpu ? kGpuGemmSize : kCpuGemmSize;
  const at::Tensor a = at::randn({out.gemm_size, out.gemm_size}, types.compute_options()), b = at::randn_like(a);
  at::Tensor product = at::empty_like(a);
  const auto n = static_cast<double>(out.gemm_size);
  out.gemm_rate = 2.0 * n * n * n / median(timer.time(repeats, [&] { at::mm_out(product, a, b.t()); }));
  return out;
}

}  // namespace oomb::bench
