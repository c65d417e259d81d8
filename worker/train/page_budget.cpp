#include "worker/train/page_budget.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <sstream>

#include "configs/error.h"
#include "configs/this_machine.h"
#include "worker/tensor/segments.h"
#include "worker/train/device_memory.h"

namespace oomb {

namespace {

std::string size_text(int64_t bytes) {
  if (bytes < int64_t{10} << 20) return std::to_string(bytes) + " bytes";  // "0.00 GiB" would say nothing
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << static_cast<double>(bytes) / (1 << 30) << " GiB";
  return text.str();
}

// A layer's temporaries, the logits tile and slack: what must stay free besides pages and kept activations.
int64_t working_bytes(const model::ModelConfig& m, const PipelineOptions& o, const TensorTypes& types) {
  const int64_t logits = 3 * std::min(o.loss_row_tile, o.chunk_tokens) * m.vocab_size * 4;
  const int64_t layer = 2 * SequencePipeline::activation_bytes(m, o, types, KeptActivations::all) / m.num_layers;
  const int64_t slack = types.device.is_cuda() ? int64_t{4} << 30 : int64_t{256} << 20;
  return layer + logits + slack;
}

std::optional<KeptActivations> level_of(Activations setting) {
  switch (setting) {
    case Activations::kAuto:
      return std::nullopt;
    case Activations::kAll:
      return KeptActivations::all;
    case Activations::kNoNorms:
      return KeptActivations::no_norms;
    case Activations::kAttention:
      return KeptActivations::attention;
    case Activations::kInput:
      return KeptActivations::input;
  }
  return std::nullopt;
}

// The most that one chunk can keep within `bytes`.
KeptActivations fitting_level(int64_t bytes, const std::function<int64_t(KeptActivations)>& bytes_of) {
  for (const KeptActivations level : kAllLevels) {
    if (bytes_of(level) <= bytes) return level;
  }
  return KeptActivations::input;
}

// Attention outputs first, for as many chunks as possible: they save most work per byte. Then whole chunks.
ActivationPlan plan_activations(const PipelineSection& settings, KeptActivations level, int64_t bytes,
                                int64_t num_chunks, const std::function<int64_t(KeptActivations)>& bytes_of) {
  ActivationPlan plan;
  plan.recomputed = level;
  const int64_t whole = bytes_of(level), part = bytes_of(std::max(level, KeptActivations::attention));
  plan.kept_chunks = settings.kept_chunks > 0 ? settings.kept_chunks : bytes / part;
  plan.kept_chunks = std::clamp<int64_t>(plan.kept_chunks, 1, num_chunks);
  const int64_t rest = std::max<int64_t>(bytes - plan.kept_chunks * part, 0);
  plan.whole_chunks = whole > part ? std::min(rest / (whole - part), plan.kept_chunks) : plan.kept_chunks;
  return plan;
}

// With weights, gradients and optimizer states in place, a step needs this much of the device even if pages are
// elsewhere.
void refuse_without_room(int64_t free_bytes, int64_t working, int64_t activations) {
  if (working + activations <= free_bytes) return;
  throw InputError(
      "device memory: a chunk needs " + size_text(activations) + " for activations and " + size_text(working) +
      " for a layer's work and the logits, " + size_text(free_bytes) +
      " are free beside weights, gradients and optimizer states; lower sequence.chunk or loss.row_tile, set "
      "pipeline.activations: input, or train.optimizer_state: int8 with train.master_weights: "
      "stochastic_rounding");
}

std::string describe(const ActivationPlan& plan, int64_t num_chunks, int64_t bytes,
                     const std::function<int64_t(KeptActivations)>& bytes_of) {
  const KeptActivations part = std::max(plan.recomputed, KeptActivations::attention);
  std::ostringstream text;
  text << "activations: " << size_text(bytes) << "; of " << num_chunks << " chunks the newest " << plan.whole_chunks
       << " keep " << name_of(plan.recomputed) << " (" << size_text(bytes_of(plan.recomputed)) << " each), "
       << plan.kept_chunks - plan.whole_chunks << " more " << name_of(part) << " (" << size_text(bytes_of(part))
       << " each), " << plan.host_chunks << " more these in host memory; "
       << num_chunks - plan.kept_chunks - plan.host_chunks << " are computed again in pass 2 and keep "
       << name_of(plan.recomputed) << " there";
  return text.str();
}

}  // namespace

PageBudget plan_page_budget(const RunConfig& config, const model::ModelConfig& model, const PipelineOptions& pipeline,
                            const TensorTypes& types, bool training, const WorkerShare& share) {
  PageBudget budget;
  const pages::PageLayout layout = SequencePipeline::page_layout(model, pipeline, types, config.sequence.length);
  const ChunkGrid grid{config.sequence.length, pipeline.chunk_tokens, pipeline.selection.page_tokens};
  // Nobody reads the pages of the last chunk; whose it is differs from sequence to sequence.
  const int64_t own_chunks = (grid.num_chunks() + share.workers - 1) / share.workers;
  const int64_t slots =
      layout.num_layers * std::min(own_chunks, grid.num_chunks() - 1) * (grid.chunk_tokens / grid.page_tokens);
  budget.home_bytes = slots * layout.kv_slot_bytes;
  budget.gradient_bytes = training ? slots * layout.gradient_slot_bytes : 0;

  pages::PageMemory::Options& memory = budget.memory;
  const bool gpu = types.device.is_cuda();
  const int64_t free_bytes = free_device_bytes(types.device);
  const std::optional<KeptActivations> level = level_of(config.pipeline.activations);
  const auto bytes_of = [&](KeptActivations l) {
    return SequencePipeline::activation_bytes(model, pipeline, types, l);
  };
  if (gpu)
    refuse_without_room(free_bytes, working_bytes(model, pipeline, types),
                        bytes_of(level.value_or(KeptActivations::input)));
  if (gpu && share.workers > 1 && !share.reads_device) {
    budget.lines.emplace_back("pages: in host memory, since the network between workers does not read device memory");
  } else if (!config.pages.hbm_bytes.automatic) {
    memory.fast_bytes = config.pages.hbm_bytes.bytes;
  } else if (gpu) {
    const int64_t most = free_bytes - working_bytes(model, pipeline, types);
    memory.fast_bytes = std::max<int64_t>(most - bytes_of(level ? *level : fitting_level(most / 4, bytes_of)), 0);
  }
  const int64_t host_there = available_host_bytes();
  const int64_t host_left = host_there < 0 ? host_there : host_there / share.workers_here;
  if (!config.pages.host_bytes.automatic) {
    memory.host_bytes = config.pages.host_bytes.bytes;
    if (host_left >= 0 && memory.host_bytes > host_left) {
      throw InputError("pages.host_bytes: " + size_text(memory.host_bytes) + " asked for, " + size_text(host_left) +
                       " left on this machine (or in its control group); allowed: at most that, or auto");
    }
  } else {
    memory.host_bytes = host_left < 0 ? 0 : host_left / 10 * 8;
  }
  if (share.workers > 1) {
    const ByteSize& cache = config.pages.cache_bytes;
    budget.transfer = cluster::plan_transfer_slots(grid, pipeline.selection, share.workers, layout,
                                                   cache.automatic ? memory.host_bytes / 8 : cache.bytes);
    const int64_t bytes = cluster::transfer_bytes(budget.transfer, layout);
    budget.lines.push_back("exchange: " + size_text(bytes) + " of host memory for " +
                           std::to_string(budget.transfer.cache) + " pages of other workers and " +
                           std::to_string(budget.transfer.staging) + " gradients for them");
    if (bytes > memory.host_bytes) {
      throw InputError("pages.host_bytes: " + size_text(memory.host_bytes) + " are there, " + size_text(bytes) +
                       " are needed for transfers between workers alone; bound them with attention.chunk_pages or "
                       "lower pages.cache_bytes");
    }
    memory.host_bytes -= bytes;
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
  // What neither pages nor a layer's work need goes to activations that are then not computed twice. The GPU's own
  // memory decides there; on a CPU half of the rest is left to others.
  const int64_t working = working_bytes(model, pipeline, types), all_pages = budget.home_bytes + budget.gradient_bytes;
  const int64_t left =
      gpu ? free_bytes - working - std::min(memory.fast_bytes, all_pages) : (host_left - working - all_pages) / 2;
  const ByteSize& asked = config.pipeline.activation_bytes;
  const int64_t bytes = std::max<int64_t>(asked.automatic ? left : std::min(asked.bytes, left), 0);
  budget.activations =
      plan_activations(config.pipeline, level ? *level : fitting_level(bytes, bytes_of), bytes, own_chunks, bytes_of);
  if (gpu && budget.activations.recomputed < KeptActivations::input) {
    const ByteSize& host = config.pipeline.activation_host_bytes;
    const int64_t spare = memory.host_bytes - std::max<int64_t>(all_pages - memory.fast_bytes, 0);
    const int64_t block = HostActivations::block_bytes(model, types.compute, pipeline.chunk_tokens);
    budget.activations.host_chunks = std::clamp<int64_t>((host.automatic ? spare : std::min(host.bytes, spare)) / block,
                                                         0, own_chunks - budget.activations.kept_chunks);
  }
  budget.lines.push_back(describe(budget.activations, own_chunks, bytes, bytes_of));
  budget.lines.push_back("pages: homes " + size_text(budget.home_bytes) + ", gradient slots at most " +
                         size_text(budget.gradient_bytes) + "; budget: fast " + size_text(memory.fast_bytes) +
                         ", host " + size_text(memory.host_bytes));
  return budget;
}

}  // namespace oomb
