#include "worker/bench/model_flops.h"

#include "worker/pipeline/chunk_grid.h"

namespace oomb::bench {

int64_t attended_keys(const PipelineOptions& options, int64_t num_tokens) {
  const attention::SelectionRule& rule = options.selection;
  const ChunkGrid grid{num_tokens, options.chunk_tokens, rule.page_tokens};
  int64_t keys = 0;
  for (int64_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
    const int64_t tokens = grid.tokens_of(chunk), past = grid.first_page_of(chunk);
    const int64_t pages = rule.dense ? past : std::min(past, rule.budget_pages);
    keys += tokens * (tokens + 1) / 2 + tokens * pages * rule.page_tokens;
  }
  return keys;
}

double model_flops(const model::ModelConfig& c, const PipelineOptions& options, int64_t num_tokens) {
  const int64_t table = c.tie_word_embeddings ? 0 : c.vocab_size * c.hidden_size;
  const auto weights = static_cast<double>(model::num_parameters(c) - table);
  const auto width = static_cast<double>(c.num_heads * c.head_dim * c.num_layers);
  return 6.0 * weights * static_cast<double>(num_tokens) +
         12.0 * width * static_cast<double>(attended_keys(options, num_tokens));
}

}  // namespace oomb::bench
