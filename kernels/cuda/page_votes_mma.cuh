// Page votes in bf16 on tensor cores (mma.sync, sm_80 and later).
//
// The sum of a group's queries is an fp32 value, and so is a mean with its bias part. Each is cut into two bf16 parts,
// x = hi + lo to 2^-18, and the scores are hi*hi + lo*hi + hi*lo in fp32. A mean without bias part is exact in one.
// Both operands are prepared in the workspace in the order and swizzle of the shared-memory tiles: a tile is 128 rows
// of 64 dimensions, whose 16-byte pieces are permuted by row, so that ldmatrix meets no bank conflict and a tile is
// filled by a plain copy. A block keeps its 128 token rows in shared memory and streams the pages of its split past
// them. Warps are 2 (strips of 64 tokens) x 4 (32 pages each).
#pragma once

#include "kernels/cuda/page_votes_plan.cuh"

namespace oomb::kernels::cuda {

inline constexpr int kMmaThreads = 256;
inline constexpr int kStages = 3;
inline constexpr int kTileBytes = kTileElements * 2;

inline int mma_shared_bytes(const VotesPlan& plan) {
  const int q = static_cast<int>(plan.dim / kDimChunk) * 2 * kTileBytes;
  return q + kStages * static_cast<int>(plan.mean_parts) * kTileBytes;
}

// --- preparation
// ------------------------------------------------------------------------------------------------------

/// Element offset of 8 dimensions (piece) of a row in a tile.
__device__ inline int swizzled(int row, int piece) { return row * kDimChunk + ((piece ^ (row & 7)) * 8); }

__device__ inline void split_store(const float (&x)[8], bf16* hi_at, bf16* lo_at) {
  Pack<bf16, 8> hi, lo;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    hi.v[e] = __float2bfloat16_rn(x[e]);
    lo.v[e] = __float2bfloat16_rn(x[e] - __bfloat162float(hi.v[e]));
  }
  *reinterpret_cast<Pack<bf16, 8>*>(hi_at) = hi;
  if (lo_at != nullptr) *reinterpret_cast<Pack<bf16, 8>*>(lo_at) = lo;
}

/// One thread: 8 dimensions of one row of one head. `kVector`: rows can be read 16 bytes at a time.
template <bool kVector>
__global__ void __launch_bounds__(256) prepare_queries_kernel(PageVotes op, VotesPlan plan, float scale) {
  const int64_t pieces = plan.dim / 8, rows = plan.token_blocks * kBlockRows;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= op.kv_heads * rows * pieces) return;
  const int64_t piece = i % pieces, row = i / pieces % rows, head = i / pieces / rows;
  const int64_t token = token_of(op, plan, row);
  float x[8] = {};
  if (token >= 0) {
    const bf16* q =
        static_cast<const bf16*>(op.q) + (head * op.num_tokens + token) * op.group * op.head_dim + piece * 8;
    for (int64_t g = 0; g < op.group; ++g, q += op.head_dim) {
      if constexpr (kVector) {
        if (piece * 8 >= op.head_dim) break;
        const Pack<bf16, 8> part = *reinterpret_cast<const Pack<bf16, 8>*>(q);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] += __bfloat162float(part.v[e]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (piece * 8 + e < op.head_dim) x[e] += __bfloat162float(q[e]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= scale;
  }
  const int64_t chunks = plan.dim / kDimChunk,
                tile = (head * plan.token_blocks + row / kBlockRows) * chunks + piece / 8;
  bf16* hi = at_byte<bf16>(op.workspace, plan.q) + tile * 2 * kTileElements +
             swizzled(static_cast<int>(row % kBlockRows), static_cast<int>(piece % 8));
  split_store(x, hi, hi + kTileElements);
}

__global__ void __launch_bounds__(256) prepare_means_kernel(PageVotes op, VotesPlan plan) {
  const int64_t pieces = plan.dim / 8, pages = plan.page_tiles * kPageTile;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= op.kv_heads * pages * pieces) return;
  const int64_t piece = i % pieces, page = i / pieces % pages, head = i / pieces / pages;
  const double* centre = at_byte<const double>(op.workspace, plan.centre);
  float x[8] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int64_t j = piece * 8 + e;
    if (page < op.num_pages && j < op.head_dim) x[e] = effective_mean<bf16>(op, centre, page, head, j);
  }
  const int64_t chunks = plan.dim / kDimChunk, tile = (head * plan.page_tiles + page / kPageTile) * chunks + piece / 8;
  bf16* hi = at_byte<bf16>(op.workspace, plan.means) + tile * plan.mean_parts * kTileElements +
             swizzled(static_cast<int>(page % kPageTile), static_cast<int>(piece % 8));
  split_store(x, hi, plan.mean_parts == 2 ? hi + kTileElements : nullptr);
}

// --- instructions
// -----------------------------------------------------------------------------------------------------

__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ inline void load_matrices(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- sweeps
// -----------------------------------------------------------------------------------------------------------

/// Scores of a warp: 4 x 4 tiles of 16 tokens x 8 pages. Element e of tile (m, n) is token 16 m + lane / 4 + 8 (e / 2),
/// page 8 n + 2 (lane % 4) + e % 2.
using WarpScores = float[4][4][4];

__device__ inline void multiply_all(WarpScores& scores, const uint32_t (&q)[4][4], const uint32_t (&means)[2][4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) multiply(scores[m][n], q[m], means[n / 2][n % 2 * 2], means[n / 2][n % 2 * 2 + 1]);
  }
}

/// Adds the products of one tile of 64 dimensions. q and means are shared addresses of the warp's 64 and 32 rows.
template <int kMeanParts>
__device__ inline void multiply_tile(WarpScores& scores, uint32_t q, uint32_t means) {
  const int lane = threadIdx.x % 32;
  // ldmatrix: lane l gives a row of the (l / 8)-th 8 x 8 matrix.
  const int q_row = lane % 16, q_piece = lane / 16;
  const int mean_row = lane / 16 * 8 + lane % 8, mean_piece = lane / 8 % 2;
#pragma unroll
  for (int k = 0; k < kDimChunk / 16; ++k) {
    uint32_t hi[4][4], lo[4][4], mean[kMeanParts][2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int part = 0; part < kMeanParts; ++part) {
        load_matrices(means + part * kTileBytes + 2 * swizzled(n * 16 + mean_row, 2 * k + mean_piece), mean[part][n]);
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t at = q + 2 * swizzled(m * 16 + q_row, 2 * k + q_piece);
      load_matrices(at, hi[m]);
      load_matrices(at + kTileBytes, lo[m]);
    }
    // A pass over all 16 accumulators before one is used again hides the latency of the instruction.
    if constexpr (kMeanParts == 2) multiply_all(scores, hi, mean[kMeanParts - 1]);
    multiply_all(scores, lo, mean[0]);
    multiply_all(scores, hi, mean[0]);
  }
}

/// Pages beyond the last get score -inf. `left` = pages from the warp's first one to the end.
__device__ inline void mask_pages(WarpScores& scores, int64_t left) {
  if (left >= 32) return;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool outside = n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + e % 2 >= left;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (outside) scores[m][n][e] = -INFINITY;
      }
    }
  }
}

/// Running max and sum of a thread's 8 rows: row 2 m + half is token 16 m + 8 half + lane / 4.
struct RowStats {
  float top[8], sum[8];
};

__device__ inline void add_scores(RowStats& stats, const WarpScores& scores) {
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    const int m = row / 2, e = row % 2 * 2;
    float top = stats.top[row];
#pragma unroll
    for (int n = 0; n < 4; ++n) top = fmaxf(top, fmaxf(scores[m][n][e], scores[m][n][e + 1]));
    float sum = stats.sum[row] * exp2_fast(stats.top[row] - top);
#pragma unroll
    for (int n = 0; n < 4; ++n) sum += exp2_fast(scores[m][n][e] - top) + exp2_fast(scores[m][n][e + 1] - top);
    stats.top[row] = top;
    stats.sum[row] = sum;
  }
}

/// Joins the stats of the four lanes and four warps that share a row, and writes them for the block's rows.
__device__ inline void write_stats(RowStats& stats, float2* shared, float2* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int row = 0; row < 8; ++row) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float top = __shfl_xor_sync(~0u, stats.top[row], step), sum = __shfl_xor_sync(~0u, stats.sum[row], step);
      join(stats.top[row], stats.sum[row], top, sum);
    }
    const int block_row = warp / 4 * kStrip + row / 2 * 16 + row % 2 * 8 + lane / 4;
    if (lane % 4 == 0) shared[warp % 4 * kBlockRows + block_row] = make_float2(stats.top[row], stats.sum[row]);
  }
  __syncthreads();
  for (int row = threadIdx.x; row < kBlockRows; row += kMmaThreads) {
    float2 all = shared[row];
    for (int w = 1; w < 4; ++w) join(all.x, all.y, shared[w * kBlockRows + row].x, shared[w * kBlockRows + row].y);
    out[row] = all;
  }
}

/// Sums 2^(score - lse) over the warp's 64 tokens. Lane l gets the page 8 (l / 8) + 2 (l % 4) + l / 4 % 2 of the warp's
/// 32: the eight columns a thread holds are halved three times, each half going to the lane that keeps it.
__device__ inline float sum_columns(const WarpScores& scores, const float (&lse)[8]) {
  float sums[8];
#pragma unroll
  for (int column = 0; column < 8; ++column) {
    float sum = 0;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      sum += exp2_fast(scores[row / 2][column / 2][row % 2 * 2 + column % 2] - lse[row]);
    }
    sums[column] = sum;
  }
#pragma unroll
  for (int width = 4; width >= 1; width /= 2) {
    const bool upper = (threadIdx.x & (4 * width)) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float keep = upper ? sums[i + width] : sums[i], send = upper ? sums[i] : sums[i + width];
      sums[i] = keep + __shfl_xor_sync(~0u, send, 4 * width);
    }
  }
  return sums[0];
}

/// Copies `tiles` consecutive tiles into shared memory.
__device__ inline void copy_tiles(uint32_t to, const bf16* from, int tiles) {
  for (int i = threadIdx.x; i < tiles * (kTileBytes / 16); i += kMmaThreads) copy_async(to + i * 16, from + i * 8);
}

/// kVotes false: sweep 1 (stats), true: sweep 2 (votes of each strip and head).
template <bool kVotes, int kMeanParts>
__global__ void __launch_bounds__(kMmaThreads, 1) sweep_mma_kernel(PageVotes op, VotesPlan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int64_t token_block = blockIdx.x % plan.token_blocks;
  const int64_t head = blockIdx.x / plan.token_blocks % op.kv_heads;
  const int64_t split = blockIdx.x / plan.token_blocks / op.kv_heads;
  const int chunks = static_cast<int>(plan.dim / kDimChunk);
  const int64_t first_tile = split * plan.page_tiles_per_split;
  const int64_t end_tile = min(first_tile + plan.page_tiles_per_split, plan.page_tiles);
  const int steps = static_cast<int>(end_tile - first_tile) * chunks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const uint32_t q_shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  // Row statistics pass through the last stage: before its first copy in sweep 2, after its last in sweep 1.
  float2* joined = reinterpret_cast<float2*>(shared + (chunks * 2 + (kStages - 1) * kMeanParts) * kTileBytes);
  const uint32_t stage_shared = q_shared + chunks * 2 * kTileBytes;
  const bf16* q =
      at_byte<const bf16>(op.workspace, plan.q) + (head * plan.token_blocks + token_block) * chunks * 2 * kTileElements;
  const bf16* means = at_byte<const bf16>(op.workspace, plan.means) +
                      (head * plan.page_tiles + first_tile) * chunks * kMeanParts * kTileElements;
  const auto fetch = [&](int step) {
    if (step < steps) {
      copy_tiles(stage_shared + step % kStages * kMeanParts * kTileBytes,
                 means + int64_t{step} * kMeanParts * kTileElements, kMeanParts);
    }
    commit_copies();
  };
  copy_tiles(q_shared, q, chunks * 2);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch(step);

  const int64_t first_row = token_block * kBlockRows + warp / 4 * kStrip;
  RowStats stats;
  float lse[8];
  if constexpr (kVotes) {
    for (int row = threadIdx.x; row < kBlockRows; row += kMmaThreads) {
      joined[row].x = row_lse<float>(op, plan, head, token_block * kBlockRows + row);
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      lse[row] = joined[warp / 4 * kStrip + row / 2 * 16 + row % 2 * 8 + lane / 4].x;
    }
  } else {
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      stats.top[row] = -3.0e38f;
      stats.sum[row] = 0;
    }
  }

  WarpScores scores = {};
  int chunk = 0;
  int64_t page = first_tile * kPageTile + warp % 4 * 32;
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    multiply_tile<kMeanParts>(scores, q_shared + chunk * 2 * kTileBytes + warp / 4 * kStrip * kDimChunk * 2,
                              stage_shared + step % kStages * kMeanParts * kTileBytes + warp % 4 * 32 * kDimChunk * 2);
    if (++chunk < chunks) continue;
    chunk = 0;
    mask_pages(scores, op.num_pages - page);
    if constexpr (kVotes) {
      const float vote = sum_columns(scores, lse);
      const int64_t at = page + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2, strip = first_row / kStrip;
      if (at < op.num_pages && strip < plan.strips) {
        at_byte<float>(op.workspace, plan.partial)[(strip * op.kv_heads + head) * op.num_pages + at] = vote;
      }
    } else {
      add_scores(stats, scores);
    }
    page += kPageTile;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = 0;
      }
    }
  }
  if constexpr (!kVotes) {
    __syncthreads();
    const int64_t rows = plan.token_blocks * kBlockRows;
    write_stats(
        stats, joined,
        at_byte<float2>(op.workspace, plan.stats) + (split * op.kv_heads + head) * rows + token_block * kBlockRows);
  }
}

template <bool kVotes, int kMeanParts>
Status launch_sweep_mma(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  const int64_t grid = plan.token_blocks * op.kv_heads * plan.splits;
  if (grid > kMaxBlocks) return invalid("page_votes: more work than one grid holds");
  const int bytes = mma_shared_bytes(plan);
  const Status status = checked(
      cudaFuncSetAttribute(sweep_mma_kernel<kVotes, kMeanParts>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (!status) return status;
  sweep_mma_kernel<kVotes, kMeanParts><<<static_cast<unsigned>(grid), kMmaThreads, bytes, stream>>>(op, plan);
  return launched();
}

template <int kMeanParts>
Status launch_sweeps_mma(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  if (const Status status = launch_sweep_mma<false, kMeanParts>(stream, op, plan); !status) return status;
  return launch_sweep_mma<true, kMeanParts>(stream, op, plan);
}

inline Status votes_mma(cudaStream_t stream, const PageVotes& op, const VotesPlan& plan) {
  const float scale = static_cast<float>(op.score_scale * 1.4426950408889634);
  const int64_t pieces = plan.dim / 8;
  const int64_t q_grid = ceil_div(op.kv_heads * plan.token_blocks * kBlockRows * pieces, 256);
  const int64_t mean_grid = ceil_div(op.kv_heads * plan.page_tiles * kPageTile * pieces, 256);
  if (q_grid > kMaxBlocks || mean_grid > kMaxBlocks) return invalid("page_votes: more work than one grid holds");
  find_centre<bf16>(stream, op, plan);
  if (op.head_dim % 8 == 0 && aligned16(op.q)) {
    prepare_queries_kernel<true><<<static_cast<unsigned>(q_grid), 256, 0, stream>>>(op, plan, scale);
  } else {
    prepare_queries_kernel<false><<<static_cast<unsigned>(q_grid), 256, 0, stream>>>(op, plan, scale);
  }
  prepare_means_kernel<<<static_cast<unsigned>(mean_grid), 256, 0, stream>>>(op, plan);
  if (const Status status = launched(); !status) return status;
  const Status status =
      plan.mean_parts == 2 ? launch_sweeps_mma<2>(stream, op, plan) : launch_sweeps_mma<1>(stream, op, plan);
  return status ? sum_votes<float>(stream, op, plan) : status;
}

}  // namespace oomb::kernels::cuda
