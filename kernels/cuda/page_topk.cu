// Top-k of votes on CUDA: one block per row finds the k-th largest key by radix selection (11 bits of the key a pass,
// counts in shared memory), then every thread writes its own run of candidates, which keeps the output ascending and
// gives ties to the lower page. Counts are integers, so the order of the atomics does not matter.
#include <type_traits>

#include "kernels/cuda/dtype.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/dispatch_pages.h"
#include "kernels/page_select.h"

namespace oomb::kernels::cuda {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;

template <class Acc>
using key_t = std::conditional_t<std::is_same_v<Acc, double>, uint64_t, uint32_t>;

/// An unsigned key in the order of the votes; -0 equals 0, and a NaN is below everything.
template <class Acc>
__device__ key_t<Acc> key_of(Acc vote) {
  using Key = key_t<Acc>;
  constexpr Key kSign = Key(1) << (8 * sizeof(Key) - 1);
  if (isnan(vote)) return 0;
  Key bits;
  if constexpr (sizeof(Key) == 8) {
    bits = static_cast<Key>(__double_as_longlong(vote + 0.0));
  } else {
    bits = __float_as_uint(vote + 0.0f);
  }
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

/// Exclusive sum over the block of a pair of counts, and its total. All threads call it.
__device__ int2 exclusive_sum(int2 value, int2* warp_sums, int2* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) sum = make_int2(sum.x + x, sum.y + y);
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before = make_int2(0, 0), all = make_int2(0, 0);
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all = make_int2(all.x + warp_sums[w].x, all.y + warp_sums[w].y);
  }
  __syncthreads();
  *total = all;
  return make_int2(before.x + sum.x - value.x, before.y + sum.y - value.y);
}

/// Forced candidates are [0, begin) and [end, count); `wanted` of [begin, end) are chosen by vote.
struct Range {
  int begin, end, count, wanted;
};

/// Finds the key of the wanted-th largest vote in [begin, end) and how many votes of exactly that key are to be taken.
template <class Acc>
__device__ void select(const Acc* votes, const int32_t* candidates, const Range& range, int* bins, int2* warp_sums,
                       key_t<Acc>* threshold, int* equal_wanted) {
  using Key = key_t<Acc>;
  constexpr int kBits = 8 * sizeof(Key);
  __shared__ Key shared_prefix;
  __shared__ int shared_left;
  Key prefix = 0, known = 0;  // bits found so far, and the mask of their places
  int left = range.wanted;
  for (int high = kBits; high > 0; high -= kDigitBits) {
    const int shift = high > kDigitBits ? high - kDigitBits : 0, digits = high - shift;
    for (int b = threadIdx.x; b < kBins; b += kThreads) bins[b] = 0;
    __syncthreads();
    // Votes of a row crowd in few bins, so a warp first counts equal digits among its lanes.
    for (int base = range.begin; base < range.end; base += kThreads) {
      const int c = base + static_cast<int>(threadIdx.x);
      int digit = -1;
      if (c < range.end) {
        const Key key = key_of(votes[candidates != nullptr ? candidates[c] : c]);
        if ((key & known) == prefix) digit = static_cast<int>((key >> shift) & ((Key(1) << digits) - 1));
      }
      const unsigned same = __match_any_sync(~0u, digit);
      if (digit >= 0 && static_cast<int>(threadIdx.x % 32) == __ffs(same) - 1) atomicAdd(&bins[digit], __popc(same));
    }
    __syncthreads();
    // Thread t owns bins from the top: the t-th pair of bins in descending order.
    constexpr int kOwn = kBins / kThreads;
    int own[kOwn], sum = 0;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      own[o] = bins[kBins - 1 - (static_cast<int>(threadIdx.x) * kOwn + o)];
      sum += own[o];
    }
    int2 total;
    int above = exclusive_sum(make_int2(sum, 0), warp_sums, &total).x;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      if (above < left && left <= above + own[o]) {
        const int bin = kBins - 1 - (static_cast<int>(threadIdx.x) * kOwn + o);
        shared_prefix = prefix | (static_cast<Key>(bin) << shift);
        shared_left = left - above;
      }
      above += own[o];
    }
    __syncthreads();
    prefix = shared_prefix;
    left = shared_left;
    known |= ((Key(1) << digits) - 1) << shift;
  }
  *threshold = prefix;
  *equal_wanted = left;
}

template <class Acc>
__global__ void __launch_bounds__(kThreads) top_k_kernel(PageTopK op, Range range) {
  using Key = key_t<Acc>;
  __shared__ int bins[kBins];
  __shared__ int2 warp_sums[kWarps];
  const int64_t row = blockIdx.x;
  const Acc* votes = static_cast<const Acc*>(op.votes) + row * op.num_pages;
  const int32_t* candidates = op.candidates;
  const auto page_of = [&](int c) { return candidates != nullptr ? candidates[c] : c; };

  const int open = range.end - range.begin;
  const bool all = range.wanted == open;  // nothing to compare; also when both are zero
  Key threshold = 0;
  int equal_wanted = 0;
  if (!all && range.wanted > 0) select(votes, candidates, range, bins, warp_sums, &threshold, &equal_wanted);

  // Each thread owns a run of the open candidates: it counts, learns what precedes it, and writes.
  const int each = (open + kThreads - 1) / kThreads;
  const int first = range.begin + min(open, static_cast<int>(threadIdx.x) * each);
  const int last = min(range.end, first + each);
  int above = 0, equal = 0;
  if (all) {
    above = last - first;
  } else if (range.wanted > 0) {
    for (int c = first; c < last; ++c) {
      const Key key = key_of(votes[page_of(c)]);
      above += key > threshold;
      equal += key == threshold;
    }
  }
  int2 total;
  const int2 before = exclusive_sum(make_int2(above, equal), warp_sums, &total);
  int32_t* out = op.pages + row * op.budget;
  int place = range.begin + before.x + min(before.y, equal_wanted), equal_left = equal_wanted - before.y;
  for (int c = first; c < last && (all || range.wanted > 0); ++c) {
    bool chosen = all;
    if (!all) {
      const Key key = key_of(votes[page_of(c)]);
      chosen = key > threshold || (key == threshold && equal_left-- > 0);
    }
    if (chosen) out[place++] = page_of(c);
  }
  for (int c = threadIdx.x; c < range.begin; c += kThreads) out[c] = page_of(c);
  const int shift = range.begin + range.wanted - range.end;  // place of a recent candidate = its index + shift
  for (int c = range.end + static_cast<int>(threadIdx.x); c < range.count; c += kThreads) out[c + shift] = page_of(c);
}

}  // namespace

Status page_topk(void* stream, const PageTopK& op) {
  if (op.num_rows > kMaxBlocks) return invalid("page_topk: more rows than one grid holds");
  const int64_t count = op.candidates != nullptr ? op.num_candidates : op.num_pages;
  const int64_t sinks = op.sink < op.budget ? op.sink : op.budget;
  const int64_t room = op.budget - sinks;
  const int64_t recents = op.recent < room ? op.recent : room;
  const Range range{static_cast<int>(sinks), static_cast<int>(count - recents), static_cast<int>(count),
                    static_cast<int>(room - recents)};
  return with_acc(op.acc, [&](auto acc) {
    top_k_kernel<decltype(acc)><<<static_cast<unsigned>(op.num_rows), kThreads, 0, stream_of(stream)>>>(op, range);
    return launched();
  });
}

}  // namespace oomb::kernels::cuda
