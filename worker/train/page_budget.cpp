#include "worker/train/page_budget.h"

#include <algorithm>
#include <sstream>

#include "configs/error.h"
#include "worker/tensor/segments.h"
#include "worker/train/device_memory.h"
#include "worker/train/memory_budget.h"

namespace oomb {

namespace {

std::string size_text(int64_t bytes) {
  if (bytes < int64_t{10} << 20) return std::to_string(bytes) + " bytes";  // "0.00 GiB" would say nothing
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << static_cast<double>(bytes) / (1 << 30) << " GiB";
  return text.str();
}

// One chunk's activations, its temporaries, the logits tile and slack: what must stay free besides pages.
int64_t working_bytes(const model::ModelConfig& m, const PipelineOptions& o, const TensorTypes& types) {
  const int64_t logits = 3 * std::min(o.loss_row_tile, o.chunk_tokens) * m.vocab_size * 4;
  const int64_t slack = types.device.is_cuda() ? int64_t{6} << 30 : int64_t{256} << 20;
  return SequencePipeline::activation_bytes(m, o, types) + logits + slack;
}

}  // namespace

PageBudget plan_page_budget(const RunConfig& config, const model::ModelConfig& model, const PipelineOptions& pipeline,
                            const TensorTypes& types, bool training) {
  PageBudget budget;
  const pages::PageLayout layout = SequencePipeline::page_layout(model, pipeline, types, config.sequence.length);
  // Nobody reads the pages of the last chunk.
  const ChunkGrid grid{config.sequence.length, pipeline.chunk_tokens, pipeline.selection.page_tokens};
  const int64_t slots = layout.num_layers * grid.first_page_of(grid.num_chunks() - 1);
  budget.home_bytes = slots * layout.kv_slot_bytes;
  budget.gradient_bytes = training ? slots * layout.gradient_slot_bytes : 0;

  pages::PageMemory::Options& memory = budget.memory;
  const bool gpu = types.device.is_cuda();
  if (!config.pages.hbm_bytes.automatic) {
    memory.fast_bytes = config.pages.hbm_bytes.bytes;
  } else if (gpu) {
    memory.fast_bytes = std::max<int64_t>(free_device_bytes(types.device) - working_bytes(model, pipeline, types), 0);
  }
  const int64_t host_left = available_host_bytes();
  if (!config.pages.host_bytes.automatic) {
    memory.host_bytes = config.pages.host_bytes.bytes;
    if (host_left >= 0 && memory.host_bytes > host_left) {
      throw InputError("pages.host_bytes: " + size_text(memory.host_bytes) + " asked for, " + size_text(host_left) +
                       " left on this machine (or in its control group); allowed: at most that, or auto");
    }
  } else {
    memory.host_bytes = host_left < 0 ? 0 : host_left / 10 * 8;
  }
  const int64_t largest_slot = std::max(layout.kv_slot_bytes, layout.gradient_slot_bytes);
  memory.segment_bytes = std::clamp((budget.home_bytes + budget.gradient_bytes) / 16, largest_slot, int64_t{1} << 30);
  if (gpu) {
    memory.fast = tensor_segments(at::TensorOptions().device(types.device));
    memory.host = tensor_segments(at::TensorOptions().pinned_memory(true));
  }

  const int64_t needed = budget.home_bytes + (pipeline.selection.dense ? budget.gradient_bytes : 0);
  const int64_t there = memory.fast_bytes + memory.host_bytes;
  if (needed > there) {
    const double fraction = static_cast<double>(there) / static_cast<double>(needed);
    const auto fits = static_cast<int64_t>(static_cast<double>(config.sequence.length) * fraction);
    throw InputError("pages: a sequence of " + std::to_string(config.sequence.length) + " tokens needs " +
                     size_text(needed) + " for pages, " + size_text(there) + " are there (pages.hbm_bytes " +
                     size_text(memory.fast_bytes) + ", pages.host_bytes " + size_text(memory.host_bytes) +
                     "); shorten sequence.length to about " + std::to_string(std::max(fits, config.sequence.chunk)) +
                     " or raise the budgets");
  }
  // What neither pages nor one chunk's work need goes to activations that are then not computed twice. The GPU's own
  // memory decides there; on a CPU half of the rest is left to others.
  const int64_t working = working_bytes(model, pipeline, types);
  const int64_t left = gpu ? free_device_bytes(types.device) - working -
                                 std::min(memory.fast_bytes, budget.home_bytes + budget.gradient_bytes)
                           : (host_left - working - budget.home_bytes - budget.gradient_bytes) / 2;
  const int64_t fitting = 1 + std::max<int64_t>(left, 0) / SequencePipeline::activation_bytes(model, pipeline, types);
  budget.kept_chunks =
      std::min(config.pipeline.kept_chunks > 0 ? config.pipeline.kept_chunks : fitting, grid.num_chunks());
  budget.lines.push_back("activations: " + size_text(SequencePipeline::activation_bytes(model, pipeline, types)) +
                         " per chunk; " + std::to_string(budget.kept_chunks) + " of " +
                         std::to_string(grid.num_chunks()) +
                         " chunks keep theirs, the others are computed again in pass 2");
  budget.lines.push_back("pages: homes " + size_text(budget.home_bytes) + ", gradient slots at most " +
                         size_text(budget.gradient_bytes) + "; budget: fast " + size_text(memory.fast_bytes) +
                         ", host " + size_text(memory.host_bytes));
  return budget;
}

}  // namespace oomb
