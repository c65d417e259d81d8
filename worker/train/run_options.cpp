#include "worker/train/run_options.h"

#include <algorithm>

#include "worker/train/device_memory.h"

namespace oomb {

namespace {

at::ScalarType scalar_type(ComputeDtype type) {
  switch (type) {
    case ComputeDtype::kFp64:
      return at::kDouble;
    case ComputeDtype::kFp32:
      return at::kFloat;
    case ComputeDtype::kBf16:
      return at::kBFloat16;
  }
  return at::kFloat;
}

}  // namespace

TensorTypes types_of(const RunConfig& config, int rank_here) {
  TensorTypes types;
  types.compute = scalar_type(config.train.compute_dtype);
  const bool cuda =
      config.train.device == DeviceKind::kCuda || (config.train.device == DeviceKind::kAuto && gpu_count() > 0);
  if (cuda)
    types.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank_here % std::max<int64_t>(gpu_count(), 1)));
  return types;
}

PipelineOptions pipeline_options(const RunConfig& config, const TensorTypes& types) {
  PipelineOptions o;
  o.chunk_tokens = config.sequence.chunk;
  o.loss_row_tile = config.loss.row_tile;
  attention::SelectionRule& s = o.selection;
  const AttentionSection& a = config.attention;
  s.dense = a.kind == AttentionKind::kDense;
  s.score_scale = a.score_scale;
  s.page_tokens = a.page_tokens;
  s.query_tile = a.query_tile == 0 ? a.page_tokens : a.query_tile;
  s.budget_pages = a.budget_pages;
  s.chunk_pages = a.chunk_pages;
  s.sink_pages = a.sink_pages;
  s.recent_pages = a.recent_pages;
  s.votes = a.votes == VoteSource::kTile ? attention::Votes::tile : attention::Votes::previous_tile;
  switch (config.pages.grad_dtype) {
    case PageGradDtype::kAuto:
      o.gradient_dtype = types.acc();
      break;
    case PageGradDtype::kFp32:
      o.gradient_dtype = at::kFloat;
      break;
    case PageGradDtype::kBf16:
      o.gradient_dtype = at::kBFloat16;
      break;
  }
  return o;
}

}  // namespace oomb
