// Page votes on CUDA: the plain kernels for f32 and f64 (and for head dimensions that the tensor-core path does not
// take), and the choice between the two. How the work is cut: page_votes_plan.cuh.
#include "kernels/cuda/page_votes_mma.cuh"
#include "kernels/dispatch_pages.h"

namespace oomb::kernels::cuda {

namespace {

constexpr int kThreads = 256, kSide = 16;  // 16 x 16 threads, each 4 tokens x 4 pages of a 64 x 64 tile
constexpr int kDepth = 16;                 // dimensions per step

template <class T>
__global__ void __launch_bounds__(kThreads) prepare_queries_plain_kernel(PageVotes op, VotesPlan plan, acc_t<T> scale) {
  using Acc = acc_t<T>;
  const int64_t rows = plan.token_blocks * kBlockRows, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= op.kv_heads * rows * plan.dim) return;
  const int64_t j = i % plan.dim, row = i / plan.dim % rows, head = i / plan.dim / rows;
  const int64_t token = token_of(op, plan, row);
  Acc sum = 0;
  if (token >= 0) {
    const T* q = static_cast<const T*>(op.q) + (head * op.num_tokens + token) * op.group * op.head_dim + j;
    for (int64_t g = 0; g < op.group; ++g) sum += load(q[g * op.head_dim]);
  }
  at_byte<Acc>(op.workspace, plan.q)[i] = sum * scale;
}

template <class T>
__global__ void __launch_bounds__(kThreads) prepare_means_plain_kernel(PageVotes op, VotesPlan plan) {
  using Acc = acc_t<T>;
  const int64_t pages = plan.page_tiles * kPageTile, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= op.kv_heads * pages * plan.dim) return;
  const int64_t j = i % plan.dim, page = i / plan.dim % pages, head = i / plan.dim / pages;
  Acc value = 0;
  if (page < op.num_pages) {
    value = effective_mean<T>(op, at_byte<const double>(op.workspace, plan.centre), page, head, j);
  }
  at_byte<Acc>(op.workspace, plan.means)[i] = value;
}

/// One step of the tile: 16 dimensions of 64 rows of q and of the means, through shared memory.
template <class Acc>
struct Operands {
  Acc q[kDepth][kStrip + 1], means[kDepth][kStrip + 1];
};

template <class Acc>
__device__ void score_tile(const Acc* q, const Acc* means, int64_t dim, Operands<Acc>& operands, Acc (&scores)[4][4]) {
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  for (int i = 0; i < 4; ++i) {
    for (int p = 0; p < 4; ++p) scores[i][p] = 0;
  }
  // Each step has its own sum: one long fp32 sum would have three times the error.
  for (int64_t begin = 0; begin < dim; begin += kDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kDepth * kStrip; i += kThreads) {
      const int d = i % kDepth, row = i / kDepth;
      const bool inside = begin + d < dim;
      operands.q[d][row] = inside ? q[row * dim + begin + d] : Acc(0);
      operands.means[d][row] = inside ? means[row * dim + begin + d] : Acc(0);
    }
    __syncthreads();
    Acc sums[4][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int p = 0; p < 4; ++p) sums[i][p] += operands.q[d][y * 4 + i] * operands.means[d][x + p * kSide];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int p = 0; p < 4; ++p) scores[i][p] += sums[i][p];
    }
  }
}

template <class Acc, bool kVotes>
__global__ void __launch_bounds__(kThreads) sweep_plain_kernel(PageVotes op, VotesPlan plan) {
  __shared__ Operands<Acc> operands;
  __shared__ Acc columns[kSide][kStrip + 1];
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  const int64_t strip = blockIdx.x % plan.strips, head = blockIdx.x / plan.strips % op.kv_heads;
  const int64_t split = blockIdx.x / plan.strips / op.kv_heads;
  const int64_t rows = plan.token_blocks * kBlockRows, pages = plan.page_tiles * kPageTile;
  const int64_t first = split * plan.page_tiles_per_split * kPageTile;
  const int64_t last = min(first + plan.page_tiles_per_split * kPageTile, op.num_pages);
  const Acc* q = at_byte<const Acc>(op.workspace, plan.q) + (head * rows + strip * kStrip) * plan.dim;
  const Acc* means = at_byte<const Acc>(op.workspace, plan.means) + head * pages * plan.dim;
  Acc top[4], sum[4], lse[4];
  for (int i = 0; i < 4; ++i) {
    top[i] = static_cast<Acc>(-3.0e38);
    sum[i] = 0;
    if (kVotes) lse[i] = row_lse<Acc>(op, plan, head, strip * kStrip + y * 4 + i);
  }
  for (int64_t page = first; page < last; page += kStrip) {
    Acc scores[4][4];
    score_tile(q, means + page * plan.dim, plan.dim, operands, scores);
    for (int p = 0; p < 4; ++p) {
      const bool inside = page + x + p * kSide < last;
      Acc votes = 0;
      for (int i = 0; i < 4 && inside; ++i) {
        if (kVotes) {
          votes += exp2(scores[i][p] - lse[i]);
        } else {
          join(top[i], sum[i], scores[i][p], Acc(1));
        }
      }
      if (kVotes) columns[y][x + p * kSide] = votes;
    }
    if (!kVotes) continue;
    __syncthreads();
    const int64_t at = page + threadIdx.x;
    if (threadIdx.x < kStrip && at < last) {
      Acc votes = 0;
      for (int r = 0; r < kSide; ++r) votes += columns[r][threadIdx.x];
      at_byte<Acc>(op.workspace, plan.partial)[(strip * op.kv_heads + head) * op.num_pages + at] = votes;
    }
  }
  if constexpr (!kVotes) {
    Acc* stats = at_byte<Acc>(op.workspace, plan.stats);
    for (int i = 0; i < 4; ++i) {
      for (int step = 1; step < kSide; step *= 2) {
        const Acc other_top = __shfl_xor_sync(~0u, top[i], step), other_sum = __shfl_xor_sync(~0u, sum[i], step);
        join(top[i], sum[i], other_top, other_sum);
      }
      const int64_t row = (split * op.kv_heads + head) * rows + strip * kStrip + y * 4 + i;
      if (x == 0) {
        stats[row * 2] = top[i];
        stats[row * 2 + 1] = sum[i];
      }
    }
  }
}

template <class T>
Status votes_plain(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  using Acc = acc_t<T>;
  const int64_t q_grid = ceil_div(op.kv_heads * plan.token_blocks * kBlockRows * plan.dim, kThreads);
  const int64_t mean_grid = ceil_div(op.kv_heads * plan.page_tiles * kPageTile * plan.dim, kThreads);
  const int64_t grid = plan.strips * op.kv_heads * plan.splits;
  if (q_grid > kMaxBlocks || mean_grid > kMaxBlocks || grid > kMaxBlocks) {
    return invalid("page_votes: more work than one grid holds");
  }
  const Acc scale = static_cast<Acc>(op.score_scale * 1.4426950408889634);
  find_centre<T>(stream, op, plan);
  prepare_queries_plain_kernel<T><<<static_cast<unsigned>(q_grid), kThreads, 0, stream>>>(op, plan, scale);
  prepare_means_plain_kernel<T><<<static_cast<unsigned>(mean_grid), kThreads, 0, stream>>>(op, plan);
  sweep_plain_kernel<Acc, false><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(op, plan);
  sweep_plain_kernel<Acc, true><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(op, plan);
  if (const Status status = launched(); !status) return status;
  return sum_votes<Acc>(stream, op, plan);
}

/// bf16 with tiles that fit into the shared memory of the current device.
bool on_tensor_cores(const PageVotes& op) {
  if (op.dtype != DType::bf16) return false;
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  if (op.head_dim > 4 * kDimChunk) return false;
  return mma_shared_bytes(votes_plan(op, true)) <= bytes;
}

}  // namespace

int64_t page_votes_workspace_bytes(const PageVotes& op) { return votes_plan(op, on_tensor_cores(op)).total; }

Status page_votes(void* stream, const PageVotes& op) {
  const bool tensor_cores = on_tensor_cores(op);
  const VotesPlan plan = votes_plan(op, tensor_cores);
  if (tensor_cores) return votes_mma(stream_of(stream), op, plan);
  return with_type(op.dtype, [&](auto t) { return votes_plain<decltype(t)>(stream_of(stream), op, plan); });
}

}  // namespace oomb::kernels::cuda
