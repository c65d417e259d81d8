// From a public op to its device: every op `name(queue, op)` is cpu::name(op) or cuda::name(stream, op).
#pragma once

#include <type_traits>

#include "kernels/types.h"

namespace oomb::kernels {

inline constexpr Status kOk{};

constexpr Status invalid(const char* what) { return {Code::invalid_argument, what}; }

/// Returns from the calling op with `what` unless `condition` holds.
#define OOMB_KERNEL_REQUIRE(condition, what) \
  do {                                       \
    if (!(condition)) return invalid(what);  \
  } while (false)

/// The CUDA side of an op, or null in a build without CUDA kernels.
#ifdef OOMB_HAVE_CUDA
#define OOMB_CUDA_OP(name) (&cuda::name)
#else
#define OOMB_CUDA_OP(name) (nullptr)
#endif

template <class Op>
Status dispatch(const Queue& queue, const Op& op, std::type_identity_t<Status (*)(const Op&)> on_cpu,
                std::type_identity_t<Status (*)(void*, const Op&)> on_cuda) {
  switch (queue.device) {
    case Device::cpu:
      return on_cpu(op);
    case Device::cuda:
      if (on_cuda == nullptr) return {Code::no_device, "this build has no CUDA kernels"};
      return on_cuda(queue.stream, op);
  }
  return invalid("unknown device");
}

}  // namespace oomb::kernels
