// The sizes that plans count with are those that the pipeline allocates.
#include <gtest/gtest.h>

#include "worker/pipeline/host_activations.h"
#include "worker/pipeline/sequence_pipeline.h"
#include "worker/sizes/model_sizes.h"

namespace oomb {
namespace {

model::ModelConfig model_of(std::int64_t kv_heads) {
  model::ModelConfig m;
  m.hidden_size = 36;
  m.intermediate_size = 50;
  m.num_layers = 3;
  m.num_heads = 6;
  m.num_kv_heads = kv_heads;
  m.head_dim = 10;
  m.vocab_size = 17;
  return m;
}

TEST(SizesMatch, ActivationsAndSlots) {
  struct Row {
    const char* dtype;
    at::ScalarType compute, gradient;
  };
  for (const Row& row :
       {Row{"fp64", at::kDouble, at::kDouble}, {"fp32", at::kFloat, at::kFloat}, {"bf16", at::kBFloat16, at::kFloat}}) {
    for (const std::int64_t kv_heads : {1, 2, 6}) {
      const model::ModelConfig model = model_of(kv_heads);
      const RunConfig config = parse_run_config(
          "model: {config: m.json}\ndata: {kind: copy}\nsequence: {chunk: 21, length: 100}\nattention: {page_tokens: "
          "7}\n",
          "run.yaml", "/base", std::vector<std::string>{std::string("train.compute_dtype=") + row.dtype});
      PipelineOptions options;
      options.chunk_tokens = 21;
      options.selection.page_tokens = 7;
      options.gradient_dtype = row.gradient;
      TensorTypes types;
      types.compute = row.compute;
      const std::pair<Activations, KeptActivations> levels[] = {{Activations::kAll, KeptActivations::all},
                                                                {Activations::kNoNorms, KeptActivations::no_norms},
                                                                {Activations::kAttention, KeptActivations::attention},
                                                                {Activations::kInput, KeptActivations::input}};
      for (const auto& [setting, level] : levels) {
        EXPECT_EQ(sizes::activation_bytes(model, config, setting),
                  SequencePipeline::activation_bytes(model, options, types, level));
      }
      EXPECT_EQ(sizes::host_activation_bytes(model, config), HostActivations::block_bytes(model, row.compute, 21));
      const pages::PageLayout layout = SequencePipeline::page_layout(model, options, types, 100);
      EXPECT_EQ(sizes::page_bytes(model, config).home, layout.kv_slot_bytes);
      EXPECT_EQ(sizes::page_bytes(model, config).gradient, layout.gradient_slot_bytes);
    }
  }
}

}  // namespace
}  // namespace oomb
