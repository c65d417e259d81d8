// LM head and cross-entropy, fused over tiles of rows: the logits of at most `row_tile` rows exist at a time.
#pragma once

#include <ATen/ATen.h>

#include "worker/model/parameters.h"

namespace oomb {

/// Labels of -100 are ignored. Loss is a sum over labels, in double, on the tensors' device.
struct HeadLoss {
  at::Tensor loss_sum;  ///< double [1]
  at::Tensor d_hidden;  ///< [C, H], gradient of grad_scale * loss_sum; undefined unless asked for
};

/// hidden [C, H] after the final norm, labels int64 [C]. With `gradients`, adds to the head's gradient.
HeadLoss head_loss(const at::Tensor& hidden, const at::Tensor& labels, model::Parameter& head, int64_t row_tile,
                   double grad_scale, bool gradients);

}  // namespace oomb
