// Page means on CUDA. A chunk's K is read once (4 MiB for Qwen2.5-7B), so a plain kernel is enough: one block per
// (page, KV head), a warp per group of tokens, sums joined through shared memory in a fixed order.
#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/dispatch_pages.h"
#include "kernels/page_select.h"

namespace oomb::kernels::cuda {

namespace {

constexpr int kLanes = 32, kGroups = 16;

template <class T>
__global__ void __launch_bounds__(kLanes* kGroups) means_kernel(PageMeans op) {
  using Acc = acc_t<T>;
  __shared__ Acc sums[kGroups][kLanes + 1];
  const int64_t page = blockIdx.x / op.kv_heads, head = blockIdx.x % op.kv_heads;
  const int64_t first = page * op.page_tokens;
  const int64_t last = first + op.page_tokens < op.num_tokens ? first + op.page_tokens : op.num_tokens;
  const int64_t dim = op.head_dim, half = dim / 2;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const T* k = static_cast<const T*>(op.k) + head * op.num_tokens * dim;
  const Acc *cos = static_cast<const Acc*>(op.cos), *sin = static_cast<const Acc*>(op.sin);
  for (int64_t strip = 0; strip < dim; strip += kLanes) {
    const int64_t j = strip + lane;
    Acc sum = 0;
    if (j < dim) {
      Acc straight = 0, crossed = 0;  // R * bias, element j = straight * cos + crossed * sin
      const int64_t angle = j < half ? j : j - half;
      if (op.bias != nullptr) {
        const Acc* bias = static_cast<const Acc*>(op.bias) + head * dim;
        straight = bias[j];
        crossed = j < half ? -bias[j + half] : bias[j - half];
      }
#pragma unroll 4
      for (int64_t token = first + group; token < last; token += kGroups) {
        Acc value = load(k[token * dim + j]);
        if (op.bias != nullptr) {
          value -= straight * cos[token * half + angle] + crossed * sin[token * half + angle];
        }
        sum += value;
      }
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0 && j < dim) {
      for (int g = 1; g < kGroups; ++g) sum += sums[g][lane];
      static_cast<T*>(op.means)[blockIdx.x * dim + j] = store<T>(sum / static_cast<Acc>(last - first));
    }
    __syncthreads();
  }
}

}  // namespace

Status page_means(void* stream, const PageMeans& op) {
  const int64_t grid = ceil_div(op.num_tokens, op.page_tokens) * op.kv_heads;
  if (grid > kMaxBlocks) return invalid("page_means: more pages than one grid holds");
  return with_type(op.dtype, [&](auto t) {
    means_kernel<decltype(t)><<<static_cast<unsigned>(grid), kLanes * kGroups, 0, stream_of(stream)>>>(op);
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
