#include "worker/loss/head_loss.h"

#include <algorithm>

#include "kernels/cross_entropy.h"
#include "worker/tensor/glue.h"

namespace oomb {

HeadLoss head_loss(const at::Tensor& hidden, const at::Tensor& labels, model::Parameter& head, int64_t row_tile,
                   double grad_scale, bool gradients) {
  const int64_t num_rows = hidden.size(0), vocab = head.weight.size(0);
  const auto acc = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor losses = at::empty({num_rows}, hidden.options().dtype(acc));
  HeadLoss out;
  if (gradients) out.d_hidden = at::empty_like(hidden);
  for (int64_t begin = 0; begin < num_rows; begin += row_tile) {
    const int64_t rows = std::min(row_tile, num_rows - begin);
    const at::Tensor x = hidden.narrow(0, begin, rows);
    at::Tensor logits = linear_rows(x, head.weight);
    const at::Tensor tile_labels = labels.narrow(0, begin, rows), tile_losses = losses.narrow(0, begin, rows);
    kernels::CrossEntropy op;
    op.num_rows = rows;
    op.vocab = vocab;
    op.row_stride = vocab;
    op.dtype = dtype_of(logits);
    op.grad_scale = grad_scale;
    op.write_grad = gradients;
    op.logits = logits.data_ptr();
    op.labels = tile_labels.data_ptr<int64_t>();
    op.loss = tile_losses.data_ptr();
    check(kernels::cross_entropy(queue_of(logits), op), "cross_entropy");
    if (!gradients) continue;
    at::Tensor d_x = out.d_hidden.narrow(0, begin, rows);
    at::mm_out(d_x, logits, head.weight);
    accumulate_weight_gradient(logits, x, head.grad);
  }
  out.loss_sum = losses.sum(at::kDouble);
  return out;
}

}  // namespace oomb
