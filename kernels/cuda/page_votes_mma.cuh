// Page votes of bf16 queries and means on tensor cores (mma.sync, sm_80 and later), to the accuracy of fp32 scores.
//
// The sum of a group's queries is an fp32 value x, and so is a mean with its bias part. A row (token and head, or page
// and head) is scaled by a power of two that puts its largest |x| into [2^14, 2^15), and each x is cut into two fp16
// parts, hi nearest to x and lo nearest to x - hi. For |x| in [2^e, 2^(e+1)):
//   - |x - hi| <= 2^(e-11), and that lies on a grid of 2^(e-22) in lo: |x - hi - lo| <= 2^(e-23) <= 2^-23 |x|;
//   - where the grid of fp16 ends, at 2^-24, the error is at most 2^-25, which is 2^-39 of the row's largest |x|.
// A mean without bias part is bf16: hi holds its 8 bits exactly if |x| >= 2^-17, that is 2^-31 of the page's largest,
// and within 2^-25 below; it needs no lo. Scores are lo*hi + hi*lo + hi*hi; lo*lo, at most 2^-22 |q m|, random in sign
// and mostly far less, is left out. So a score is off by the rounding of fp32 factors plus at most 2^-38 D max|q|
// max|m|, which is less than the last bit of one product of those maxima in fp32.
//
// The tensor core cuts its sums toward zero, so a score summed by 16 or 24 instructions drifts by several last bits.
// Instead each 64 or 32 dimensions have their own sum, which takes the small products first (their cuts are of no
// weight) and hi*hi last, and is added to the score, with the page's scale undone, by one fp32 FMA. Where scores reach
// 50, an emulation of the instruction then has votes within 6e-6 (8e-6 with sums of 8 products, as on sm_80), near the
// 3e-6 of exact scores rounded to fp32; one plain sum has 2e-5.
//
// Both operands are prepared in the workspace in the order and swizzle of the shared-memory tiles: a tile is 128 rows
// of 64 dimensions, whose 16-byte pieces are permuted by row, so that ldmatrix meets no bank conflict and a tile is
// filled by a plain copy. A block keeps its 128 token rows in shared memory and streams the pages of its split past
// them. Warps are 2 (strips of 64 tokens) x 4 (32 pages each).
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/page_votes_plan.cuh"

namespace oomb::kernels::cuda {

inline constexpr int kMmaThreads = 256;
inline constexpr int kStages = 3;
inline constexpr int kTileBytes = kTileElements * 2;

using half = __half;

inline int mma_shared_bytes(const VotesPlan& plan) {
  const int q = static_cast<int>(plan.dim / kDimChunk) * 2 * kTileBytes;
  return q + kStages * static_cast<int>(plan.mean_parts) * kTileBytes;
}

// --- preparation
// ------------------------------------------------------------------------------------------------------

/// Element offset of 8 dimensions (piece) of a row in a tile.
__device__ inline int swizzled(int row, int piece) { return row * kDimChunk + ((piece ^ (row & 7)) * 8); }

/// 2^shift, -126 <= shift <= 127.
__device__ inline float power_of_two(int shift) { return __int_as_float((shift + 127) << 23); }

/// Exponent of the scale that puts the largest |x| of a row into [2^14, 2^15). `lanes` neighbouring threads (a power of
/// two, aligned in the warp) hold the row. Rows that stay below 2^-86, zero among them, get 2^100: products with them
/// are nothing beside a score's rounding.
__device__ inline int row_shift(const float (&x)[8], int lanes) {
  float top = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) top = fmaxf(top, fabsf(x[e]));
  for (int step = 1; step < lanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  return min(100, 14 + 127 - (__float_as_int(top) >> 23));
}

/// Stores hi and, unless lo_at is null, lo of 8 scaled elements.
__device__ inline void split_store(const float (&x)[8], float scale, half* hi_at, half* lo_at) {
  Pack<half, 8> hi, lo;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float scaled = x[e] * scale;
    hi.v[e] = __float2half_rn(scaled);
    lo.v[e] = __float2half_rn(scaled - __half2float(hi.v[e]));
  }
  store_vec(hi_at, hi);
  if (lo_at != nullptr) store_vec(lo_at, lo);
}

/// Sum of the group's queries, 8 dimensions from `first`, which is below the head dimension.
template <bool kVector>
__device__ void sum_group(const PageVotes& op, int64_t head, int64_t token, int64_t first, float (&x)[8]) {
  const bf16* q = static_cast<const bf16*>(op.q) + (head * op.num_tokens + token) * op.group * op.head_dim + first;
  for (int64_t g = 0; g < op.group; ++g, q += op.head_dim) {
    if constexpr (kVector) {
      const Pack<bf16, 8> part = load_vec<8>(q);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += __bfloat162float(part.v[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (first + e < op.head_dim) x[e] += __bfloat162float(q[e]);
      }
    }
  }
}

/// Threads that share a row in the preparation: one per 8 dimensions, rounded up to a power of two. At most 32.
inline int row_lanes(const VotesPlan& plan) { return plan.dim <= 64 ? 8 : plan.dim <= 128 ? 16 : 32; }

/// One thread: 8 dimensions of one row of one head. `kVector`: rows can be read 16 bytes at a time.
template <bool kVector>
__global__ void __launch_bounds__(256) prepare_queries_kernel(PageVotes op, VotesPlan plan, float scale, int lanes) {
  const int64_t rows = plan.token_blocks * kBlockRows, i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const int64_t piece = i % lanes, row = i / lanes % rows, head = i / lanes / rows;
  const int64_t token = token_of(op, plan, row);
  float x[8] = {};
  if (token >= 0 && piece * 8 < op.head_dim) sum_group<kVector>(op, head, token, piece * 8, x);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= scale;
  const int shift = row_shift(x, lanes);
  if (piece == 0) at_byte<float>(op.workspace, plan.q_scale)[head * rows + row] = power_of_two(-shift);
  if (piece * 8 >= plan.dim) return;
  const int64_t chunks = plan.dim / kDimChunk,
                tile = (head * plan.token_blocks + row / kBlockRows) * chunks + piece / 8;
  half* hi = at_byte<half>(op.workspace, plan.q) + tile * 2 * kTileElements +
             swizzled(static_cast<int>(row % kBlockRows), static_cast<int>(piece % 8));
  split_store(x, power_of_two(shift), hi, hi + kTileElements);
}

__global__ void __launch_bounds__(256) prepare_means_kernel(PageVotes op, VotesPlan plan, int lanes) {
  const int64_t pages = plan.page_tiles * kPageTile, i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const int64_t piece = i % lanes, page = i / lanes % pages, head = i / lanes / pages;
  const double* centre = at_byte<const double>(op.workspace, plan.centre);
  float x[8] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int64_t j = piece * 8 + e;
    if (page < op.num_pages && j < op.head_dim) x[e] = effective_mean<bf16>(op, centre, page, head, j);
  }
  const int shift = row_shift(x, lanes);
  if (piece == 0) at_byte<float>(op.workspace, plan.mean_scale)[head * pages + page] = power_of_two(-shift);
  if (piece * 8 >= plan.dim) return;
  const int64_t chunks = plan.dim / kDimChunk, tile = (head * plan.page_tiles + page / kPageTile) * chunks + piece / 8;
  half* hi = at_byte<half>(op.workspace, plan.means) + tile * plan.mean_parts * kTileElements +
             swizzled(static_cast<int>(page % kPageTile), static_cast<int>(piece % 8));
  split_store(x, power_of_two(shift), hi, plan.mean_parts == 2 ? hi + kTileElements : nullptr);
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

/// c += a * b, or c = a * b where `kFirst`.
template <bool kFirst>
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kFirst) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
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

/// Scales of the warp's pages as the accumulators hold them: columns 2 (lane % 4) and the next of each tile n.
using PageScales = float2[4];

/// 16 dimensions of half of the warp's tokens. A pass over all 8 accumulators before one is used again hides the
/// latency of the instruction.
template <bool kFirst>
__device__ void multiply_half(float (&sums)[2][4][4], const uint32_t (&q)[2][4], const uint32_t (&means)[2][4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      multiply<kFirst>(sums[m][n], q[m], means[n / 2][n % 2 * 2], means[n / 2][n % 2 * 2 + 1]);
    }
  }
}

/// Fragments of 16 dimensions (step k of a tile): of 32 tokens, and of the warp's 32 pages. ldmatrix: lane l gives a
/// row of the (l / 8)-th 8 x 8 matrix.
__device__ inline void load_queries(uint32_t (&q)[2][4], uint32_t tile, int first_row, int k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    load_matrices(tile + 2 * swizzled(first_row + m * 16 + lane % 16, 2 * k + lane / 16), q[m]);
  }
}
__device__ inline void load_means(uint32_t (&means)[2][4], uint32_t tile, int k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    load_matrices(tile + 2 * swizzled(n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2), means[n]);
  }
}

/// Adds the products of one tile of 64 dimensions, with the scales of the pages undone. q and means are shared
/// addresses of the warp's 64 and 32 rows, hi parts; lo parts follow kTileBytes later. Registers set the two cuts:
/// tokens go in two halves, and with two parts of means a sum has 32 dimensions.
template <int kMeanParts>
__device__ inline void multiply_tile(WarpScores& scores, uint32_t q, uint32_t means, const PageScales& page_scales) {
  constexpr int kTileSteps = kDimChunk / 16, kSteps = kTileSteps / kMeanParts;
#pragma unroll 1
  for (int first = 0; first < kTileSteps; first += kSteps) {
    uint32_t hi_means[kSteps][2][4];
#pragma unroll
    for (int row = 0; row < kStrip; row += 32) {
      float sums[2][4][4];
      uint32_t hi[kSteps][2][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t lo[2][4];
        if (row == 0) load_means(hi_means[k], means, first + k);
        load_queries(lo, q + kTileBytes, row, first + k);
        if (k == 0) {
          multiply_half<true>(sums, lo, hi_means[k]);
        } else {
          multiply_half<false>(sums, lo, hi_means[k]);
        }
        if constexpr (kMeanParts == 2) {
          uint32_t lo_means[2][4];
          load_means(lo_means, means + kTileBytes, first + k);
          load_queries(hi[k], q, row, first + k);
          multiply_half<false>(sums, hi[k], lo_means);
        }
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if constexpr (kMeanParts == 1) load_queries(hi[k], q, row, first + k);
        multiply_half<false>(sums, hi[k], hi_means[k]);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = scores[row / 16 + m][n][e];
            score = fmaf(sums[m][n][e], e % 2 == 0 ? page_scales[n].x : page_scales[n].y, score);
          }
        }
      }
    }
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

/// Values of a thread's 8 rows: row 2 m + half is token 16 m + 8 half + lane / 4.
using RowValues = float[8];
__device__ inline int block_row(int row) {
  return threadIdx.x / 128 * kStrip + row / 2 * 16 + row % 2 * 8 + threadIdx.x % 32 / 4;
}

/// Running max and sum of 2^(score - max), scores with the row's scale undone.
struct RowStats {
  RowValues top, sum;
};

__device__ inline void add_scores(RowStats& stats, const WarpScores& scores, const RowValues& scales) {
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    const int m = row / 2, e = row % 2 * 2;
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < 4; ++n) top = fmaxf(top, fmaxf(scores[m][n][e], scores[m][n][e + 1]));
    top = fmaxf(stats.top[row], top * scales[row]);
    float sum = stats.sum[row] * exp2_fast(stats.top[row] - top);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum +=
          exp2_fast(fmaf(scores[m][n][e], scales[row], -top)) + exp2_fast(fmaf(scores[m][n][e + 1], scales[row], -top));
    }
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
    if (lane % 4 == 0) shared[warp % 4 * kBlockRows + block_row(row)] = make_float2(stats.top[row], stats.sum[row]);
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
__device__ inline float sum_columns(const WarpScores& scores, const RowValues& scales, const RowValues& lse) {
  float sums[8];
#pragma unroll
  for (int column = 0; column < 8; ++column) {
    float sum = 0;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      sum += exp2_fast(fmaf(scores[row / 2][column / 2][row % 2 * 2 + column % 2], scales[row], -lse[row]));
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
__device__ inline void copy_tiles(uint32_t to, const half* from, int tiles) {
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
  const half* q =
      at_byte<const half>(op.workspace, plan.q) + (head * plan.token_blocks + token_block) * chunks * 2 * kTileElements;
  const half* means = at_byte<const half>(op.workspace, plan.means) +
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
  RowValues lse, scales;
  const float* q_scale =
      at_byte<const float>(op.workspace, plan.q_scale) + (head * plan.token_blocks + token_block) * kBlockRows;
#pragma unroll
  for (int row = 0; row < 8; ++row) scales[row] = q_scale[block_row(row)];
  if constexpr (kVotes) {
    for (int row = threadIdx.x; row < kBlockRows; row += kMmaThreads) {
      joined[row].x = row_lse<float>(op, plan, head, token_block * kBlockRows + row);
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < 8; ++row) lse[row] = joined[block_row(row)].x;
  } else {
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      stats.top[row] = -3.0e38f;
      stats.sum[row] = 0;
    }
  }

  WarpScores scores = {};
  PageScales page_scales;
  int chunk = 0;
  int64_t page = first_tile * kPageTile + warp % 4 * 32;
  const float* mean_scale =
      at_byte<const float>(op.workspace, plan.mean_scale) + head * plan.page_tiles * kPageTile + lane % 4 * 2;
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    if (chunk == 0) {
#pragma unroll
      for (int n = 0; n < 4; ++n) page_scales[n] = *reinterpret_cast<const float2*>(mean_scale + page + n * 8);
    }
    multiply_tile<kMeanParts>(scores, q_shared + chunk * 2 * kTileBytes + warp / 4 * kStrip * kDimChunk * 2,
                              stage_shared + step % kStages * kMeanParts * kTileBytes + warp % 4 * 32 * kDimChunk * 2,
                              page_scales);
    if (++chunk < chunks) continue;
    chunk = 0;
    mask_pages(scores, op.num_pages - page);
    if constexpr (kVotes) {
      const float vote = sum_columns(scores, scales, lse);
      const int64_t at = page + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2, strip = first_row / kStrip;
      if (at < op.num_pages && strip < plan.strips) {
        at_byte<float>(op.workspace, plan.partial)[(strip * op.kv_heads + head) * op.num_pages + at] = vote;
      }
    } else {
      add_scores(stats, scores, scales);
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
  const int lanes = row_lanes(plan);
  static_assert(kBlockRows * 8 % 256 == 0 && kPageTile * 8 % 256 == 0,
                "every thread has a row: it takes part in shuffles");
  const int64_t q_grid = op.kv_heads * plan.token_blocks * kBlockRows * lanes / 256;
  const int64_t mean_grid = op.kv_heads * plan.page_tiles * kPageTile * lanes / 256;
  if (q_grid > kMaxBlocks || mean_grid > kMaxBlocks) return invalid("page_votes: more work than one grid holds");
  find_centre<bf16>(stream, op, plan);
  if (op.head_dim % 8 == 0 && aligned16(op.q)) {
    prepare_queries_kernel<true><<<static_cast<unsigned>(q_grid), 256, 0, stream>>>(op, plan, scale, lanes);
  } else {
    prepare_queries_kernel<false><<<static_cast<unsigned>(q_grid), 256, 0, stream>>>(op, plan, scale, lanes);
  }
  prepare_means_kernel<<<static_cast<unsigned>(mean_grid), 256, 0, stream>>>(op, plan, lanes);
  if (const Status status = launched(); !status) return status;
  const Status status =
      plan.mean_parts == 2 ? launch_sweeps_mma<2>(stream, op, plan) : launch_sweeps_mma<1>(stream, op, plan);
  return status ? sum_votes<float>(stream, op, plan) : status;
}

}  // namespace oomb::kernels::cuda
