#include "worker/bench/chunk_rig.h"

#include "worker/bench/page_room.h"

namespace oomb::bench {

namespace {

attention::ChunkQkv random_qkv(const Workbench& bench, int64_t tokens) {
  const model::ModelConfig& m = bench.model;
  const auto options = bench.types.compute_options();
  return {at::randn({m.num_kv_heads, tokens, m.num_heads / m.num_kv_heads, m.head_dim}, options),
          at::randn({m.num_kv_heads, tokens, 1, m.head_dim}, options),
          at::randn({m.num_kv_heads, tokens, 1, m.head_dim}, options)};
}

}  // namespace

ChunkRig::ChunkRig(const Workbench& bench, bool with_pages)
    : qkv(random_qkv(bench, bench.chunk_tokens())),
      shape_{bench.model.num_kv_heads, bench.options.selection.page_tokens, bench.model.head_dim},
      gradient_dtype_(bench.options.gradient_dtype),
      past_pages_(bench.past_pages()) {
  inputs.q = qkv.q;
  inputs.means = at::randn({past_pages_, shape_.kv_heads, shape_.head_dim}, bench.types.compute_options());
  chunk_positions = at::arange(past_pages_ * shape_.page_tokens, past_pages_ * shape_.page_tokens + tokens(),
                               bench.types.index_options());
  if (with_pages) write_past(bench);
}

attention::PastPages ChunkRig::past(const attention::Selection& selection) {
  return {&selection, table_.get(), &source_, home_addresses_, /*layer=*/0, /*chunk=*/0, shape_, gradient_dtype_};
}

void ChunkRig::write_past(const Workbench& bench) {
  pages::PageLayout layout =
      SequencePipeline::page_layout(bench.model, bench.options, bench.types, past_pages_ * shape_.page_tokens);
  layout.num_layers = 1;
  memory_ = std::make_unique<pages::PageMemory>(layout, page_room(layout, bench.types.device, Placement::fast));
  table_ = std::make_unique<pages::PageTable>(layout, memory_.get());
  source_.begin_sequence({{}, table_.get(), {}, {}}, cluster::Work::training);
  home_addresses_ = at::empty({past_pages_}, bench.types.index_options());
  const int64_t chunk_pages = bench.options.chunk_tokens / shape_.page_tokens;
  const attention::Selection none;
  for (int64_t first = 0; first < past_pages_; first += chunk_pages) {
    const attention::ChunkQkv chunk = random_qkv(bench, chunk_pages * shape_.page_tokens);
    attention::write_pages(chunk, past(none), first);
    inputs.means.narrow(0, first, chunk_pages).copy_(attention::page_means(chunk.k, shape_.page_tokens, {}, {}));
  }
}

}  // namespace oomb::bench
