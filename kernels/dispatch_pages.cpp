// Validation of the page ops and the choice of their device.
#include "kernels/dispatch_pages.h"

#include "kernels/dispatch.h"

namespace oomb::kernels {

namespace {

bool whole(const PageShape& shape) { return shape.kv_heads > 0 && shape.page_tokens > 0 && shape.head_dim > 0; }
bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace

Status page_write(const Queue& queue, const PageWrite& op) {
  OOMB_KERNEL_REQUIRE(whole(op.shape), "page_write: a size of the page is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0, "page_write: num_tokens is negative");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.k && op.v && op.slots, "page_write: null pointer");
  return dispatch(queue, op, &cpu::page_write, OOMB_CUDA_OP(page_write));
}

Status page_gather(const Queue& queue, const PageGather& op) {
  OOMB_KERNEL_REQUIRE(whole(op.shape), "page_gather: a size of the page is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tiles >= 0 && op.pages_per_tile >= 0, "page_gather: a count is negative");
  if (op.num_tiles == 0 || op.pages_per_tile == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.k && op.v && op.slots, "page_gather: null pointer");
  return dispatch(queue, op, &cpu::page_gather, OOMB_CUDA_OP(page_gather));
}

Status page_scatter(const Queue& queue, const PageScatter& op) {
  OOMB_KERNEL_REQUIRE(whole(op.shape), "page_scatter: a size of the page is not positive");
  OOMB_KERNEL_REQUIRE(op.num_segments >= 0 && op.pages_per_tile >= 0, "page_scatter: a count is negative");
  if (op.num_segments == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.pages_per_tile > 0, "page_scatter: segments need pages_per_tile");
  OOMB_KERNEL_REQUIRE(op.dk && op.dv && op.segment_begin && op.sources && op.slots && op.first,
                      "page_scatter: null pointer");
  return dispatch(queue, op, &cpu::page_scatter, OOMB_CUDA_OP(page_scatter));
}

Status page_gradient_read(const Queue& queue, const PageGradientRead& op) {
  OOMB_KERNEL_REQUIRE(whole(op.shape), "page_gradient_read: a size of the page is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0, "page_gradient_read: num_tokens is negative");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.dk && op.dv && op.slots, "page_gradient_read: null pointer");
  return dispatch(queue, op, &cpu::page_gradient_read, OOMB_CUDA_OP(page_gradient_read));
}

Status page_means(const Queue& queue, const PageMeans& op) {
  OOMB_KERNEL_REQUIRE(op.kv_heads > 0 && op.page_tokens > 0 && op.head_dim > 0, "page_means: a size is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0, "page_means: num_tokens is negative");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.k && op.means, "page_means: null pointer");
  if (op.bias != nullptr) {
    OOMB_KERNEL_REQUIRE(op.cos && op.sin, "page_means: a bias needs cos and sin");
    OOMB_KERNEL_REQUIRE(op.head_dim % 2 == 0, "page_means: a bias needs an even head_dim");
  }
  return dispatch(queue, op, &cpu::page_means, OOMB_CUDA_OP(page_means));
}

int64_t page_votes_workspace_bytes(const Queue& queue, const PageVotes& op) {
  if (op.num_tokens <= 0 || op.kv_heads <= 0 || op.group <= 0 || op.head_dim <= 0 || op.tile_tokens <= 0 ||
      op.num_pages <= 0) {
    return 0;
  }
#ifdef OOMB_HAVE_CUDA
  if (queue.device == Device::cuda) return cuda::page_votes_workspace_bytes(op);
#endif
  return queue.device == Device::cpu ? cpu::page_votes_workspace_bytes(op) : 0;
}

Status page_votes(const Queue& queue, const PageVotes& op) {
  OOMB_KERNEL_REQUIRE(op.kv_heads > 0 && op.group > 0 && op.head_dim > 0 && op.tile_tokens > 0 && op.num_pages > 0,
                      "page_votes: a size is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0, "page_votes: num_tokens is negative");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.q && op.means && op.votes && op.workspace, "page_votes: null pointer");
  OOMB_KERNEL_REQUIRE(aligned(op.workspace, 256), "page_votes: the workspace is not aligned to 256 bytes");
  if (op.bias_mean != nullptr) {
    OOMB_KERNEL_REQUIRE(op.page_cos && op.page_sin, "page_votes: bias_mean needs page_cos and page_sin");
    OOMB_KERNEL_REQUIRE(op.head_dim % 2 == 0, "page_votes: bias_mean needs an even head_dim");
  }
  return dispatch(queue, op, &cpu::page_votes, OOMB_CUDA_OP(page_votes));
}

int64_t page_topk_workspace_bytes(const Queue& queue, const PageTopK& op) {
  if (queue.device != Device::cpu || op.num_rows <= 0) return 0;
  return cpu::page_topk_workspace_bytes(op);
}

Status page_topk(const Queue& queue, const PageTopK& op) {
  OOMB_KERNEL_REQUIRE(op.num_rows >= 0 && op.num_pages > 0, "page_topk: a size is not positive");
  OOMB_KERNEL_REQUIRE(op.num_pages <= INT32_MAX / 2, "page_topk: num_pages is above 2^30");
  OOMB_KERNEL_REQUIRE(op.acc != DType::bf16, "page_topk: votes are f32 or f64");
  OOMB_KERNEL_REQUIRE(op.sink >= 0 && op.recent >= 0, "page_topk: sink or recent is negative");
  const int64_t candidates = op.candidates != nullptr ? op.num_candidates : op.num_pages;
  OOMB_KERNEL_REQUIRE(candidates <= op.num_pages, "page_topk: more candidates than pages");
  OOMB_KERNEL_REQUIRE(op.budget >= 1 && op.budget <= candidates, "page_topk: budget is not in [1, candidates]");
  if (op.num_rows == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.votes && op.pages, "page_topk: null pointer");
  OOMB_KERNEL_REQUIRE(op.workspace || page_topk_workspace_bytes(queue, op) == 0, "page_topk: null workspace");
  return dispatch(queue, op, &cpu::page_topk, OOMB_CUDA_OP(page_topk));
}

Status lse_merge(const Queue& queue, const LseMerge& op) {
  OOMB_KERNEL_REQUIRE(op.kv_heads > 0 && op.group > 0 && op.head_dim > 0, "lse_merge: a size is not positive");
  OOMB_KERNEL_REQUIRE(op.num_tokens >= 0, "lse_merge: num_tokens is negative");
  const bool b = op.o_b != nullptr;
  OOMB_KERNEL_REQUIRE(b == (op.lse_b != nullptr), "lse_merge: o_b and lse_b are given together");
  const bool f64 = op.a_dtype == DType::f64 || (b && op.b_dtype == DType::f64) || op.out_dtype == DType::f64;
  OOMB_KERNEL_REQUIRE(op.acc == (f64 ? DType::f64 : DType::f32), "lse_merge: acc does not fit the element types");
  if (op.num_tokens == 0) return kOk;
  OOMB_KERNEL_REQUIRE(op.o_a && op.lse_a && op.out && op.lse, "lse_merge: null pointer");
  OOMB_KERNEL_REQUIRE(op.out != op.o_a || (!op.token_major && op.a_dtype == op.out_dtype),
                      "lse_merge: out may be o_a only with the same layout and type");
  return dispatch(queue, op, &cpu::lse_merge, OOMB_CUDA_OP(lse_merge));
}

}  // namespace oomb::kernels
