#include "coordinator/plan/max_sequence.h"

#include <functional>

#include "coordinator/plan/plan.h"
#include "worker/sizes/model_sizes.h"

namespace oomb::plan {
namespace {

// Beyond this many chunks a plan is no longer about a machine; the bisection stops there.
constexpr std::int64_t kMaxChunks = std::int64_t{1} << 24;

bool fits(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware) {
  return fit_layout(config, model, hardware).memory.fits();
}

struct Change {
  std::string text;
  std::function<void(RunConfig&)> apply;
};

// Those that this run has not made yet, the ones that cost least first.
std::vector<Change> possible_changes(const RunConfig& config, const Hardware& hardware) {
  std::vector<Change> changes;
  if (!config.pages.hbm_bytes.automatic)
    changes.push_back({"pages.hbm_bytes=auto", [](RunConfig& c) { c.pages.hbm_bytes = {}; }});
  if (!config.pages.host_bytes.automatic)
    changes.push_back({"pages.host_bytes=auto", [](RunConfig& c) { c.pages.host_bytes = {}; }});
  if (config.pipeline.activations != Activations::kAuto)
    changes.push_back({"pipeline.activations=auto", [](RunConfig& c) { c.pipeline.activations = Activations::kAuto; }});
  if (config.pipeline.kept_chunks > 0)
    changes.push_back({"pipeline.kept_chunks=0", [](RunConfig& c) { c.pipeline.kept_chunks = 0; }});
  if (config.train.optimizer_state == OptimizerState::kFp32 && config.train.compute_dtype != ComputeDtype::kFp64)
    changes.push_back(
        {"train.optimizer_state=int8", [](RunConfig& c) { c.train.optimizer_state = OptimizerState::kInt8; }});
  if (config.train.compute_dtype == ComputeDtype::kBf16) {
    if (config.train.master_weights != MasterWeights::kStochasticRounding)
      changes.push_back({"train.master_weights=stochastic_rounding",
                         [](RunConfig& c) { c.train.master_weights = MasterWeights::kStochasticRounding; }});
    if (config.pages.grad_dtype != PageGradDtype::kBf16)
      changes.push_back({"pages.grad_dtype=bf16", [](RunConfig& c) { c.pages.grad_dtype = PageGradDtype::kBf16; }});
    if (config.pages.dtype != PageDtype::kFp8)
      changes.push_back({"pages.dtype=fp8", [](RunConfig& c) { c.pages.dtype = PageDtype::kFp8; }});
  }
  const std::int64_t half = config.sequence.chunk / 2;
  if (half > 0 && half % sizes::query_tile(config.attention) == 0)
    changes.push_back({"sequence.chunk=" + std::to_string(half), [half](RunConfig& c) { c.sequence.chunk = half; }});
  const std::int64_t room = hardware.nodes * hardware.workers_per_node;
  for (std::int64_t w = config.topology.workers * 2; w <= room; w *= 2) {
    RunConfig more = config;
    more.topology.workers = w;
    if (possible_layouts(more).empty()) break;
    changes.push_back({"topology.workers=" + std::to_string(w), [w](RunConfig& c) { c.topology.workers = w; }});
  }
  return changes;
}

}  // namespace

LongestSequence longest_sequence(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware) {
  RunConfig probe = config;
  const std::int64_t chunk = config.sequence.chunk;
  const auto fits_at = [&](std::int64_t chunks) {
    probe.sequence.length = chunks * chunk;
    return fits(probe, model, hardware);
  };
  std::int64_t good = 0, bad = 1;
  while (bad <= kMaxChunks && fits_at(bad)) {
    good = bad;
    bad *= 2;
  }
  if (bad > kMaxChunks) return {good * chunk, ""};
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (fits_at(middle) ? good : bad) = middle;
  }
  probe.sequence.length = bad * chunk;
  const MemoryPlan memory = fit_layout(probe, model, hardware).memory;
  return {good * chunk, memory.problems.front()};
}

std::vector<std::string> changes_to_fit(const RunConfig& config, const model::ModelConfig& model,
                                        const Hardware& hardware, std::int64_t max_sequence) {
  const std::vector<Change> changes = possible_changes(config, hardware);
  std::vector<std::string> enough;
  for (const Change& change : changes) {
    RunConfig changed = config;
    change.apply(changed);
    if (fits(changed, model, hardware)) enough.push_back(change.text);
  }
  if (enough.empty()) {
    RunConfig changed = config;
    std::string together;
    for (const Change& change : changes) {
      change.apply(changed);
      together += (together.empty() ? "" : " ") + change.text;
      if (!fits(changed, model, hardware)) continue;
      enough.push_back(together);
      break;
    }
  }
  if (max_sequence > 0) enough.push_back("sequence.length=" + std::to_string(max_sequence));
  return enough;
}

}  // namespace oomb::plan
