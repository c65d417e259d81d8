// Page means, votes and top-k on the CPU.
#include "kernels/page_select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"
#include "kernels/dispatch_pages.h"

namespace oomb::kernels::cpu {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Element j of R * x with the half-split rotation given by its cos and sin.
template <class R, class Acc>
R rotated(const Acc* x, const Acc* cos, const Acc* sin, int64_t half, int64_t j) {
  const R c = static_cast<R>(cos[j < half ? j : j - half]), s = static_cast<R>(sin[j < half ? j : j - half]);
  return j < half ? static_cast<R>(x[j]) * c - static_cast<R>(x[j + half]) * s
                  : static_cast<R>(x[j]) * c + static_cast<R>(x[j - half]) * s;
}

template <class T>
Status means(const PageMeans& op) {
  using Acc = acc_t<T>;
  constexpr int64_t kStrip = 256;
  const int64_t dim = op.head_dim, half = dim / 2;
  const int64_t pages = ceil_div(op.num_tokens, op.page_tokens);
  parallel_for(0, pages * op.kv_heads, grain_for(op.page_tokens * dim), [&](int64_t begin, int64_t end) {
    Acc sum[kStrip];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t page = task / op.kv_heads, head = task % op.kv_heads;
      const int64_t first = page * op.page_tokens, last = std::min(op.num_tokens, first + op.page_tokens);
      const T* k = static_cast<const T*>(op.k) + head * op.num_tokens * dim;
      T* out = static_cast<T*>(op.means) + task * dim;
      for (int64_t strip = 0; strip < dim; strip += kStrip) {
        const int64_t n = std::min(kStrip, dim - strip);
        std::fill(sum, sum + n, Acc(0));
        for (int64_t token = first; token < last; ++token) {
          const T* row = k + token * dim + strip;
          for (int64_t e = 0; e < n; ++e) sum[e] += load(row[e]);
          if (op.bias == nullptr) continue;
          const Acc* bias = static_cast<const Acc*>(op.bias) + head * dim;
          const Acc* cos = static_cast<const Acc*>(op.cos) + token * half;
          const Acc* sin = static_cast<const Acc*>(op.sin) + token * half;
          for (int64_t e = 0; e < n; ++e) sum[e] -= rotated<Acc>(bias, cos, sin, half, strip + e);
        }
        for (int64_t e = 0; e < n; ++e) out[strip + e] = store<T>(sum[e] / static_cast<Acc>(last - first));
      }
    }
  });
  return kOk;
}

// --- votes
// ------------------------------------------------------------------------------------------------------------

/// Where things lie in the workspace, in elements of acc. Tokens of a tile are cut into parts of a fixed size, each
/// with its own votes, so that one long tile still feeds every core and the order of sums is the same on any number.
struct VotesPlan {
  static constexpr int64_t kPartTokens = 32;  ///< tokens whose votes one task sums
  static constexpr int64_t kTokens = 4;       ///< tokens scored together

  explicit VotesPlan(const PageVotes& op)
      : tile_tokens(std::min(op.tile_tokens, op.num_tokens)),
        tiles(ceil_div(op.num_tokens, tile_tokens)),
        parts(ceil_div(tile_tokens, kPartTokens)),
        block_pages(64 / size_of(accumulator_of(op.dtype))),
        page_blocks(ceil_div(op.num_pages, block_pages)),
        padded_pages(page_blocks * block_pages) {
    means = 0;
    centre = means + op.kv_heads * padded_pages * op.head_dim;
    scratch = centre + op.kv_heads * op.head_dim;
    scratch_each = kTokens * (padded_pages + op.head_dim);
    votes = scratch + tiles * parts * scratch_each;
    total = votes + tiles * parts * op.num_pages;
  }

  int64_t tile_tokens, tiles, parts;
  int64_t block_pages;  ///< pages scored together: a row of the transposed means, 64 bytes
  int64_t page_blocks, padded_pages;
  int64_t means, centre, scratch, scratch_each, votes, total;
};

/// A vector that is subtracted from every page of a head: softmax over pages does not see it, and the scores lose the
/// large part that pages share (a key bias of norm 900 would leave fp32 scores with errors of 1e-2). Mean of up to 128
/// pages.
template <class T, class Acc>
void find_centre(const PageVotes& op, Acc* centre) {
  const int64_t dim = op.head_dim, half = dim / 2, stride = std::max<int64_t>(1, op.num_pages / 64);
  const int64_t count = ceil_div(op.num_pages, stride);
  for (int64_t i = 0; i < op.kv_heads * dim; ++i) {
    const int64_t head = i / dim, j = i % dim;
    double sum = 0;
    for (int64_t page = 0; page < op.num_pages; page += stride) {
      sum += static_cast<double>(load(static_cast<const T*>(op.means)[page * op.kv_heads * dim + i]));
      sum += rotated<double>(static_cast<const Acc*>(op.bias_mean) + head * dim,
                             static_cast<const Acc*>(op.page_cos) + page * half,
                             static_cast<const Acc*>(op.page_sin) + page * half, half, j);
    }
    centre[i] = static_cast<Acc>(sum / static_cast<double>(count));
  }
}

/// Effective means (with the bias part, without the centre) as [Hkv][page block][D][block_pages]; zero beyond the last
/// page.
template <class T, class Acc>
void transpose_means(const PageVotes& op, const VotesPlan& plan, const Acc* centre, Acc* out) {
  const int64_t dim = op.head_dim, half = dim / 2;
  parallel_for(0, op.kv_heads * plan.page_blocks, grain_for(dim * plan.block_pages), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / plan.page_blocks, first = task % plan.page_blocks * plan.block_pages;
      Acc* block = out + task * dim * plan.block_pages;
      for (int64_t p = 0; p < plan.block_pages; ++p) {
        const int64_t page = first + p;
        const T* mean = static_cast<const T*>(op.means) + (page * op.kv_heads + head) * dim;
        for (int64_t j = 0; j < dim; ++j) {
          Acc value = 0;
          if (page < op.num_pages && op.bias_mean == nullptr) {
            value = load(mean[j]);
          } else if (page < op.num_pages) {
            value = static_cast<Acc>(static_cast<double>(load(mean[j])) +
                                     rotated<double>(static_cast<const Acc*>(op.bias_mean) + head * dim,
                                                     static_cast<const Acc*>(op.page_cos) + page * half,
                                                     static_cast<const Acc*>(op.page_sin) + page * half, half, j) -
                                     static_cast<double>(centre[head * dim + j]));
          }
          block[j * plan.block_pages + p] = value;
        }
      }
    }
  });
}

/// scores[i][n] of kTokens tokens against all pages of a head; q is [kTokens][D]. Written in vectors of 32 bytes, which
/// older instruction sets do in two halves: eight sums stay in registers, and all sets add in the same order. Each 32
/// dimensions have their own sum: one long fp32 sum would have two to three times the error.
template <class Acc>
OOMB_CLONES void score(const Acc* q, const Acc* transposed, int64_t page_blocks, int64_t dim, Acc* scores) {
  using Vector __attribute__((vector_size(32))) = Acc;
  constexpr int64_t kHalf = 32 / static_cast<int64_t>(sizeof(Acc)), kBlock = 2 * kHalf, kSegment = 32;
  constexpr int kTokens = VotesPlan::kTokens;
  for (int64_t block = 0; block < page_blocks; ++block) {
    Vector low_total[kTokens] = {}, high_total[kTokens] = {};
    for (int64_t begin = 0; begin < dim; begin += kSegment) {
      Vector low[kTokens] = {}, high[kTokens] = {};
      const int64_t end = std::min(dim, begin + kSegment);
      for (int64_t d = begin; d < end; ++d) {
        const Acc* means = transposed + (block * dim + d) * kBlock;
        Vector m, n;
        std::memcpy(&m, means, sizeof(m));
        std::memcpy(&n, means + kHalf, sizeof(n));
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) {
          low[i] += q[i * dim + d] * m;
          high[i] += q[i * dim + d] * n;
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTokens; ++i) {
        low_total[i] += low[i];
        high_total[i] += high[i];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTokens; ++i) {
      Acc* to = scores + (i * page_blocks + block) * kBlock;
      std::memcpy(to, &low_total[i], sizeof(low_total[i]));
      std::memcpy(to + kHalf, &high_total[i], sizeof(high_total[i]));
    }
  }
}

/// votes[n] += softmax(scores)[n].
template <class Acc>
OOMB_CLONES void add_softmax(Acc* __restrict scores, int64_t n, Acc* __restrict votes) {
  Acc lanes[kLanes];
  for (Acc& lane : lanes) lane = scores[0];
  int64_t begin = 0;
  for (; begin + kLanes <= n; begin += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = scores[begin + l] > lanes[l] ? scores[begin + l] : lanes[l];
  }
  for (; begin < n; ++begin) lanes[0] = scores[begin] > lanes[0] ? scores[begin] : lanes[0];
  const Acc top = *std::max_element(lanes, lanes + kLanes);
  for (int64_t p = 0; p < n; ++p) scores[p] = exp_acc(scores[p] - top);
  const Acc inverse = Acc(1) / lane_sum<Acc>(n, [&](int64_t p) { return scores[p]; });
  for (int64_t p = 0; p < n; ++p) votes[p] += scores[p] * inverse;
}

template <class T>
void vote_part(const PageVotes& op, const VotesPlan& plan, int64_t first, int64_t last, const acc_t<T>* transposed,
               acc_t<T>* scratch, acc_t<T>* votes) {
  using Acc = acc_t<T>;
  const int64_t dim = op.head_dim;
  Acc *q = scratch, *scores = scratch + VotesPlan::kTokens * dim;
  std::fill(votes, votes + op.num_pages, Acc(0));
  for (int64_t token = first; token < last; token += VotesPlan::kTokens) {
    const int64_t n = std::min(VotesPlan::kTokens, last - token);
    for (int64_t head = 0; head < op.kv_heads; ++head) {
      std::fill(q, q + VotesPlan::kTokens * dim, Acc(0));
      const T* from = static_cast<const T*>(op.q) + (head * op.num_tokens + token) * op.group * dim;
      for (int64_t row = 0; row < n * op.group; ++row) {
        Acc* to = q + row / op.group * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] += load(from[row * dim + d]);
      }
      for (int64_t d = 0; d < n * dim; ++d) q[d] *= static_cast<Acc>(op.score_scale);
      score(q, transposed + head * plan.padded_pages * dim, plan.page_blocks, dim, scores);
      for (int64_t i = 0; i < n; ++i) add_softmax(scores + i * plan.padded_pages, op.num_pages, votes);
    }
  }
}

template <class T>
Status votes(const PageVotes& op) {
  using Acc = acc_t<T>;
  const VotesPlan plan(op);
  Acc* workspace = static_cast<Acc*>(op.workspace);
  Acc *transposed = workspace + plan.means, *centre = workspace + plan.centre;
  if (op.bias_mean != nullptr) find_centre<T>(op, centre);
  transpose_means<T>(op, plan, centre, transposed);

  parallel_for(0, plan.tiles * plan.parts, 1, [&](int64_t begin, int64_t end) {
    Acc* scratch = workspace + plan.scratch + begin * plan.scratch_each;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t tile_first = task / plan.parts * plan.tile_tokens;
      const int64_t tile_last = std::min(op.num_tokens, tile_first + plan.tile_tokens);
      const int64_t first = tile_first + task % plan.parts * VotesPlan::kPartTokens;
      const int64_t last = std::min(tile_last, first + VotesPlan::kPartTokens);
      vote_part<T>(op, plan, first, last, transposed, scratch, workspace + plan.votes + task * op.num_pages);
    }
  });

  Acc* out = static_cast<Acc*>(op.votes);
  parallel_for(0, plan.tiles, grain_for(plan.parts * op.num_pages), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      Acc* to = out + tile * op.num_pages;
      for (int64_t part = 0; part < plan.parts; ++part) {
        const Acc* from = workspace + plan.votes + (tile * plan.parts + part) * op.num_pages;
        for (int64_t p = 0; p < op.num_pages; ++p) to[p] = part == 0 ? from[p] : to[p] + from[p];
      }
    }
  });
  return kOk;
}

// --- top-k
// ------------------------------------------------------------------------------------------------------------

/// An unsigned key in the order of the votes; -0 equals 0, and a NaN is below everything.
template <class Acc>
auto key_of(Acc vote) {
  using Key = std::conditional_t<std::is_same_v<Acc, double>, uint64_t, uint32_t>;
  constexpr Key kSign = Key(1) << (8 * sizeof(Key) - 1);
  if (std::isnan(vote)) return Key(0);
  const Key bits = std::bit_cast<Key>(vote + Acc(0));
  return (bits & kSign) != 0 ? static_cast<Key>(~bits) : static_cast<Key>(bits | kSign);
}

template <class Acc>
Status top_k(const PageTopK& op) {
  const int64_t candidates = op.candidates != nullptr ? op.num_candidates : op.num_pages;
  const int64_t sinks = std::min({op.sink, op.budget, candidates});
  const int64_t recents = std::min({op.recent, op.budget - sinks, candidates - sinks});
  const int64_t free_begin = sinks, free_end = candidates - recents, wanted = op.budget - sinks - recents;
  int32_t* workspace = static_cast<int32_t*>(op.workspace);
  parallel_for(0, op.num_rows, grain_for(8 * candidates), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Acc* votes = static_cast<const Acc*>(op.votes) + row * op.num_pages;
      const auto page_of = [&](int64_t c) {
        return op.candidates != nullptr ? op.candidates[c] : static_cast<int32_t>(c);
      };
      int32_t* order = workspace + row * candidates;  // candidates by index, so that the order of ids is theirs
      for (int64_t c = free_begin; c < free_end; ++c) order[c] = static_cast<int32_t>(c);
      if (wanted > 0 && wanted < free_end - free_begin) {
        std::nth_element(order + free_begin, order + free_begin + wanted - 1, order + free_end,
                         [&](int32_t x, int32_t y) {
                           const auto key_x = key_of(votes[page_of(x)]), key_y = key_of(votes[page_of(y)]);
                           return key_x != key_y ? key_x > key_y : x < y;
                         });
      }
      std::sort(order + free_begin, order + free_begin + wanted);
      int32_t* out = op.pages + row * op.budget;
      for (int64_t c = 0; c < sinks; ++c) *out++ = page_of(c);
      for (int64_t i = 0; i < wanted; ++i) *out++ = page_of(order[free_begin + i]);
      for (int64_t c = free_end; c < candidates; ++c) *out++ = page_of(c);
    }
  });
  return kOk;
}

}  // namespace

Status page_means(const PageMeans& op) {
  return with_type(op.dtype, [&](auto t) { return means<decltype(t)>(op); });
}

int64_t page_votes_workspace_bytes(const PageVotes& op) {
  return VotesPlan(op).total * size_of(accumulator_of(op.dtype));
}

Status page_votes(const PageVotes& op) {
  return with_type(op.dtype, [&](auto t) { return votes<decltype(t)>(op); });
}

int64_t page_topk_workspace_bytes(const PageTopK& op) {
  const int64_t candidates = op.candidates != nullptr ? op.num_candidates : op.num_pages;
  return op.num_rows * candidates * static_cast<int64_t>(sizeof(int32_t));
}

Status page_topk(const PageTopK& op) {
  return with_acc(op.acc, [&](auto acc) { return top_k<decltype(acc)>(op); });
}

}  // namespace oomb::kernels::cpu
