// Page votes on CUDA: what the tensor-core kernels and the plain ones share - how the work is cut, where things lie in
// the workspace, the preparation of queries and means, and the final sum.
//
// Tokens are cut into strips of 64 that never cross a tile, so a strip's votes belong to one tile. Two strips make the
// 128 rows of a token block. Pages are cut into `splits` ranges, so that a small chunk fills the device too. Sweep 1
// leaves (max, sum of 2^(score - max)) per split and row; sweep 2 joins them to the row's log-sum-exp and leaves the
// votes of each (strip, head); a last kernel sums those in order. Scores are in units of log2: score_scale * log2(e) is
// multiplied into the queries.
#pragma once

#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/page_select.h"

namespace oomb::kernels::cuda {

inline constexpr int kStrip = 64;       ///< tokens of a strip
inline constexpr int kBlockRows = 128;  ///< rows of a token block
inline constexpr int kPageTile = 128;   ///< pages scored in one step
inline constexpr int kDimChunk = 64;    ///< head dimensions of one shared-memory tile of the tensor-core path
inline constexpr int kTileElements = kBlockRows * kDimChunk;

struct VotesPlan {
  int64_t tile_tokens, tiles, strips_per_tile, strips, token_blocks;
  int64_t page_tiles, splits, page_tiles_per_split;
  int64_t dim;         ///< head dimension, padded to kDimChunk for tensor cores
  int64_t mean_parts;  ///< tensor cores: fp16 parts of a mean, 1 where it is exact
  // Offsets in the workspace in bytes.
  int64_t q, means, q_scale, mean_scale, centre, stats, partial, total;
};

inline VotesPlan votes_plan(const PageVotes& op, bool tensor_cores) {
  VotesPlan plan{};
  plan.tile_tokens = op.tile_tokens < op.num_tokens ? op.tile_tokens : op.num_tokens;
  plan.tiles = ceil_div(op.num_tokens, plan.tile_tokens);
  plan.strips_per_tile = ceil_div(plan.tile_tokens, kStrip);
  plan.strips = plan.tiles * plan.strips_per_tile;
  plan.token_blocks = ceil_div(plan.strips, kBlockRows / kStrip);
  plan.page_tiles = ceil_div(op.num_pages, kPageTile);
  // About four waves of blocks on 132 multiprocessors, each with at least four page tiles. A constant, not the device's
  // own number, so that the order of sums is the same everywhere.
  constexpr int64_t kWantedBlocks = 528, kLeastTiles = 4;
  const int64_t blocks = plan.token_blocks * op.kv_heads;
  const int64_t most = ceil_div(plan.page_tiles, kLeastTiles);
  const int64_t wanted = ceil_div(kWantedBlocks, blocks);
  plan.page_tiles_per_split = ceil_div(plan.page_tiles, wanted < most ? wanted : most);
  plan.splits = ceil_div(plan.page_tiles, plan.page_tiles_per_split);
  plan.dim = tensor_cores ? ceil_div(op.head_dim, kDimChunk) * kDimChunk : op.head_dim;
  plan.mean_parts = op.bias_mean != nullptr ? 2 : 1;

  const int64_t acc = size_of(accumulator_of(op.dtype));
  const int64_t rows = plan.token_blocks * kBlockRows, pages = plan.page_tiles * kPageTile;
  const int64_t q_element = tensor_cores ? 4 : acc, mean_element = tensor_cores ? 2 * plan.mean_parts : acc;
  const auto place = [&](int64_t bytes) {
    const int64_t at = plan.total;
    plan.total += ceil_div(bytes, 256) * 256;
    return at;
  };
  plan.q = place(op.kv_heads * rows * plan.dim * q_element);
  plan.means = place(op.kv_heads * pages * plan.dim * mean_element);
  plan.q_scale = place(tensor_cores ? op.kv_heads * rows * 4 : 0);  // what undoes the scale of a row
  plan.mean_scale = place(tensor_cores ? op.kv_heads * pages * 4 : 0);
  plan.centre = place(op.kv_heads * op.head_dim * 8);
  plan.stats = place(plan.splits * op.kv_heads * rows * 2 * acc);
  plan.partial = place(plan.strips * op.kv_heads * op.num_pages * acc);
  return plan;
}

template <class T>
__host__ __device__ T* at_byte(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

/// Token of a row of the token blocks, or -1 for padding.
__device__ inline int64_t token_of(const PageVotes& op, const VotesPlan& plan, int64_t row) {
  const int64_t strip = row / kStrip;
  const int64_t in_tile = strip % plan.strips_per_tile * kStrip + row % kStrip;
  const int64_t token = strip / plan.strips_per_tile * plan.tile_tokens + in_tile;
  return strip < plan.strips && in_tile < plan.tile_tokens && token < op.num_tokens ? token : -1;
}

/// Element j of R(first position of the page) * bias_mean.
template <class Acc>
__device__ double rotated_bias(const PageVotes& op, int64_t page, int64_t head, int64_t j) {
  const int64_t half = op.head_dim / 2, angle = page * half + (j < half ? j : j - half);
  const Acc* bias = static_cast<const Acc*>(op.bias_mean) + head * op.head_dim;
  const double cos = static_cast<const Acc*>(op.page_cos)[angle], sin = static_cast<const Acc*>(op.page_sin)[angle];
  const double other = bias[j < half ? j + half : j - half];
  return static_cast<double>(bias[j]) * cos + (j < half ? -other : other) * sin;
}

/// What the scores use for a page: mean + rotated bias - centre, formed in double since the last two nearly cancel.
template <class T>
__device__ acc_t<T> effective_mean(const PageVotes& op, const double* centre, int64_t page, int64_t head, int64_t j) {
  using Acc = acc_t<T>;
  const Acc mean = load(static_cast<const T*>(op.means)[(page * op.kv_heads + head) * op.head_dim + j]);
  if (op.bias_mean == nullptr) return mean;
  return static_cast<Acc>(static_cast<double>(mean) + rotated_bias<Acc>(op, page, head, j) -
                          centre[head * op.head_dim + j]);
}

/// A vector per head that is subtracted from every page: softmax over pages does not see it, and the scores lose the
/// large part that pages share. Mean of up to 128 pages.
template <class T>
__global__ void centre_kernel(PageVotes op, double* centre) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= op.kv_heads * op.head_dim) return;
  const int64_t head = i / op.head_dim, j = i % op.head_dim;
  const int64_t stride = op.num_pages / 64 > 1 ? op.num_pages / 64 : 1;
  double sum = 0;
  for (int64_t page = 0; page < op.num_pages; page += stride) {
    sum += static_cast<double>(load(static_cast<const T*>(op.means)[page * op.kv_heads * op.head_dim + i]));
    sum += rotated_bias<acc_t<T>>(op, page, head, j);
  }
  centre[i] = sum / static_cast<double>((op.num_pages + stride - 1) / stride);
}

template <class T>
void find_centre(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  if (op.bias_mean == nullptr) return;
  constexpr int kThreads = 64;
  centre_kernel<T><<<static_cast<unsigned>(ceil_div(op.kv_heads * op.head_dim, kThreads)), kThreads, 0, stream>>>(
      op, at_byte<double>(op.workspace, plan.centre));
}

/// Joins (max, sum) of two sets of pages; an empty set has the lowest finite max and sum 0.
template <class Acc>
__device__ void join(Acc& top, Acc& sum, Acc other_top, Acc other_sum) {
  const Acc joined = top < other_top ? other_top : top;
  sum = sum * exp2(top - joined) + other_sum * exp2(other_top - joined);
  top = joined;
}

/// log2-sum-exp2 of a row over all splits; +inf, which makes every vote 0, for padding.
template <class Acc>
__device__ Acc row_lse(const PageVotes& op, const VotesPlan& plan, int64_t head, int64_t row) {
  if (token_of(op, plan, row) < 0) return static_cast<Acc>(INFINITY);
  const int64_t rows = plan.token_blocks * kBlockRows;
  const Acc* stats = at_byte<const Acc>(op.workspace, plan.stats);
  Acc top = 0, sum = 0;
  for (int64_t split = 0; split < plan.splits; ++split) {
    const Acc* pair = stats + ((split * op.kv_heads + head) * rows + row) * 2;
    if (split == 0) {
      top = pair[0];
      sum = pair[1];
    } else {
      join(top, sum, pair[0], pair[1]);
    }
  }
  return top + log2(sum);
}

/// votes[tile, page] = sum of the tile's strips and of the heads, in that order.
template <class Acc>
__global__ void __launch_bounds__(256) sum_votes_kernel(PageVotes op, VotesPlan plan, int64_t page_blocks) {
  const int64_t tile = blockIdx.x / page_blocks, page = blockIdx.x % page_blocks * 256 + threadIdx.x;
  if (page >= op.num_pages) return;
  const int64_t count = plan.strips_per_tile * op.kv_heads;
  const Acc* from = at_byte<const Acc>(op.workspace, plan.partial) + tile * count * op.num_pages + page;
  Acc sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) sum += from[i * op.num_pages];
  static_cast<Acc*>(op.votes)[tile * op.num_pages + page] = sum;
}

template <class Acc>
Status sum_votes(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  const int64_t page_blocks = ceil_div(op.num_pages, 256), grid = plan.tiles * page_blocks;
  if (grid > kMaxBlocks) return invalid("page_votes: more votes than one grid holds");
  sum_votes_kernel<Acc><<<static_cast<unsigned>(grid), 256, 0, stream>>>(op, plan, page_blocks);
  return launched();
}

}  // namespace oomb::kernels::cuda
