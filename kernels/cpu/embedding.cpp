#include "kernels/embedding.h"

#include <cstring>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace oomb::kernels::cpu {
namespace {

template <class T>
OOMB_CLONES void add_row(int64_t n, const T* __restrict dy, acc_t<T>* __restrict to) {
  for (int64_t j = 0; j < n; ++j) to[j] += load(dy[j]);
}

template <class T>
void add_segment(const EmbeddingBackward& op, int64_t segment) {
  // Columns in blocks: the sum of a segment stays in the first cache while its rows pass by.
  constexpr int64_t kColumns = 1024;
  const int64_t* rows = op.order + op.segment_begin[segment];
  const int64_t count = op.segment_begin[segment + 1] - op.segment_begin[segment];
  acc_t<T>* to = static_cast<acc_t<T>*>(op.dtable) + op.segment_ids[segment] * op.hidden;
  for (int64_t j = 0; j < op.hidden; j += kColumns) {
    const int64_t n = op.hidden - j < kColumns ? op.hidden - j : kColumns;
    acc_t<T> sum[kColumns] = {};
    for (int64_t i = 0; i < count; ++i) add_row(n, static_cast<const T*>(op.dy) + rows[i] * op.hidden + j, sum);
    for (int64_t c = 0; c < n; ++c) to[j + c] += sum[c];
  }
}

}  // namespace

Status embedding_forward(const EmbeddingForward& op) {
  for (int64_t i = 0; i < op.num_tokens; ++i) {
    if (op.ids[i] < 0 || op.ids[i] >= op.vocab) return invalid("embedding_forward: an id is not in [0, vocab)");
  }
  const int64_t row_bytes = op.hidden * size_of(op.dtype);
  parallel_for(0, op.num_tokens, grain_for(op.hidden), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(static_cast<char*>(op.y) + i * row_bytes, static_cast<const char*>(op.table) + op.ids[i] * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  });
  return kOk;
}

Status embedding_backward(const EmbeddingBackward& op) {
  for (int64_t s = 0; s < op.num_segments; ++s) {
    if (op.segment_ids[s] < 0 || op.segment_ids[s] >= op.vocab) {
      return invalid("embedding_backward: an id is not in [0, vocab)");
    }
  }
  return with_type(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, op.num_segments, grain_for(op.hidden), [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) add_segment<T>(op, s);
    });
    return kOk;
  });
}

}  // namespace oomb::kernels::cpu
