// The two sides of the page ops. Arguments were validated by dispatch_pages.cpp: sizes are positive, pointers are set.
#pragma once

#include "kernels/lse_merge.h"
#include "kernels/page_select.h"
#include "kernels/pages.h"

namespace oomb::kernels {

namespace cpu {
Status page_write(const PageWrite& op);
Status page_gather(const PageGather& op);
Status page_scatter(const PageScatter& op);
Status page_gradient_read(const PageGradientRead& op);
Status page_means(const PageMeans& op);
int64_t page_votes_workspace_bytes(const PageVotes& op);
Status page_votes(const PageVotes& op);
int64_t page_topk_workspace_bytes(const PageTopK& op);
Status page_topk(const PageTopK& op);
Status lse_merge(const LseMerge& op);
}  // namespace cpu

namespace cuda {
Status page_write(void* stream, const PageWrite& op);
Status page_gather(void* stream, const PageGather& op);
Status page_scatter(void* stream, const PageScatter& op);
Status page_gradient_read(void* stream, const PageGradientRead& op);
Status page_means(void* stream, const PageMeans& op);
int64_t page_votes_workspace_bytes(const PageVotes& op);
Status page_votes(void* stream, const PageVotes& op);
Status page_topk(void* stream, const PageTopK& op);
Status lse_merge(void* stream, const LseMerge& op);
}  // namespace cuda

}  // namespace oomb::kernels
