// Token embedding: y[i] = table[ids[i]], and the table's gradient as a sum per distinct id in ascending token order.
// An id outside [0, vocab) is an invalid argument on the CPU; on CUDA, where the host cannot look at ids, its row of y
// is NaN and its gradient is dropped.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

struct EmbeddingForward {
  int64_t num_tokens = 0, hidden = 0, vocab = 0;
  DType dtype = DType::f32;
  const int64_t* ids = nullptr;  ///< [num_tokens], each in [0, vocab)
  const void* table = nullptr;   ///< [vocab, hidden]
  void* y = nullptr;             ///< [num_tokens, hidden]
};
Status embedding_forward(const Queue& queue, const EmbeddingForward& op);

struct EmbeddingBackward {
  int64_t num_segments = 0, hidden = 0, vocab = 0;
  DType dtype = DType::f32;                ///< of dy
  const int64_t* segment_ids = nullptr;    ///< [num_segments], distinct ids
  const int64_t* segment_begin = nullptr;  ///< [num_segments + 1], into order
  const int64_t* order = nullptr;  ///< [segment_begin[num_segments]], token rows grouped by id, ascending in each group
  const void* dy = nullptr;        ///< [num_tokens, hidden]
  void* dtable = nullptr;          ///< acc [vocab, hidden], added to
};
Status embedding_backward(const Queue& queue, const EmbeddingBackward& op);

}  // namespace oomb::kernels
