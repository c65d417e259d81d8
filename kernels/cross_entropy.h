// Softmax cross-entropy of a tile of logits rows, and its gradient in place.
//   loss[i] = logsumexp(logits[i]) - logits[i, label[i]]
//   d logits[i, v] = grad_scale * (softmax(logits[i])[v] - [v = label[i]])
// Rows with label -100 have loss 0 and gradient 0. Softmax runs in acc. A label that is neither in [0, vocab) nor -100
// is an invalid argument on the CPU; on CUDA, where the host cannot look at labels, its loss is NaN and its row
// unchanged.
#pragma once

#include "kernels/types.h"

namespace oomb::kernels {

inline constexpr int64_t kIgnoredLabel = -100;

struct CrossEntropy {
  int64_t num_rows = 0, vocab = 0;
  int64_t row_stride = 0;    ///< elements from one row of logits to the next, >= vocab
  DType dtype = DType::f32;  ///< of logits
  double grad_scale = 1.0;
  bool write_grad = true;           ///< false: logits stay as they are
  void* logits = nullptr;           ///< [num_rows, vocab]; replaced by their gradient
  const int64_t* labels = nullptr;  ///< [num_rows], each in [0, vocab) or kIgnoredLabel
  void* loss = nullptr;             ///< acc [num_rows]
};
Status cross_entropy(const Queue& queue, const CrossEntropy& op);

}  // namespace oomb::kernels
