// Loops over the cores. The split never shows in a result: each iteration owns its outputs, and a sum that crosses
// iterations is cut into blocks of a size fixed by the op, not by the number of threads.
#pragma once

#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace oomb::kernels::cpu {

/// Calls fn(b, e) on disjoint ranges that cover [begin, end), each of at least `grain` iterations but the last. Pieces
/// are contiguous and one per thread. fn must not throw.
template <class Fn>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Fn& fn) {
  if (begin >= end) return;
#ifdef _OPENMP
  const int64_t count = end - begin;
  const int64_t most = grain > 0 ? (count + grain - 1) / grain : count;
  const int64_t threads = omp_get_max_threads();
  const int64_t pieces = most < threads ? most : threads;
  if (pieces > 1 && !omp_in_parallel()) {
#pragma omp parallel num_threads(static_cast <int>(pieces))
    {
      const int64_t piece = omp_get_thread_num();
      // The runtime may grant fewer threads than asked for.
      const int64_t granted = omp_get_num_threads();
      const int64_t base = count / granted, rest = count % granted;
      const int64_t first = begin + piece * base + (piece < rest ? piece : rest);
      const int64_t last = first + base + (piece < rest ? 1 : 0);
      if (first < last) fn(first, last);
    }
    return;
  }
#else
  (void)grain;
#endif
  fn(begin, end);
}

/// Iterations whose work is about `elements_each` elements, in pieces worth waking a thread for.
constexpr int64_t grain_for(int64_t elements_each) {
  constexpr int64_t kElements = 16384;
  return elements_each >= kElements ? 1 : (kElements + elements_each - 1) / (elements_each > 0 ? elements_each : 1);
}

}  // namespace oomb::kernels::cpu
