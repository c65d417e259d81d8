#include "coordinator/plan/plan.h"

#include <algorithm>

#include "configs/error.h"
#include "coordinator/plan/max_sequence.h"
#include "worker/sizes/page_demand.h"

namespace oomb::plan {
namespace {

// Keys that a token attends to, in the mean: half of its own chunk, and past pages.
double mean_keys(const RunConfig& config) {
  const ChunkGrid grid{config.sequence.length, config.sequence.chunk, config.attention.page_tokens};
  double keys = 0;
  for (std::int64_t s = 0; s < grid.num_chunks(); ++s) {
    const std::int64_t past = grid.first_page_of(s), tokens = grid.tokens_of(s);
    const std::int64_t pages =
        config.attention.kind == AttentionKind::kDense ? past : std::min(past, config.attention.budget_pages);
    keys +=
        static_cast<double>(tokens) * (static_cast<double>(tokens) / 2 + static_cast<double>(pages * grid.page_tokens));
  }
  return keys / static_cast<double>(config.sequence.length);
}

StepTime time_of(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
                 const FittedLayout& fitted, double slowdown) {
  const CostModel cost(config, model, hardware.rates, slowdown);
  const TrafficModel traffic(config, model, fitted.layout);
  return simulate({config, model, hardware, fitted.layout, fitted.memory, cost, traffic});
}

// Measured over simulated seconds per token of one worker with this run's settings.
double slowdown_of(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
                   const MeasuredStep& measured) {
  RunConfig one = config;
  one.topology.workers = one.train.sequences_per_step = 1;
  one.exchange = Exchange::kAuto;
  one.sequence.length = measured.length;
  const double seconds = time_of(one, model, hardware, fit_layout(one, model, hardware), 1).total;
  return static_cast<double>(measured.length) / measured.tokens_per_second / seconds;
}

// A CPU node's rates are those of all its cores; its workers share them.
Hardware share_of(const Hardware& hardware, std::int64_t workers) {
  Hardware shared = hardware;
  if (hardware.gpu) return shared;
  const auto sharers = static_cast<double>(std::min(workers, hardware.workers_per_node));
  Rates& r = shared.rates;
  for (double* rate : {&r.gemm, &r.attention_forward, &r.attention_backward, &r.select, &r.copy}) *rate /= sharers;
  return shared;
}

void add_notes(const RunConfig& config, const model::ModelConfig& model, Plan& plan) {
  if (!plan.hardware.assumed.empty()) {
    std::string list;
    for (const std::string& field : plan.hardware.assumed) list += (list.empty() ? "" : ", ") + field;
    plan.notes.push_back("assumed, not measured: " + list);
  }
  if (!plan.slowdown) plan.notes.push_back("assumed: rates of the topology hold for these shapes (no calibration)");
  if (config.attention.kind == AttentionKind::kTopk)
    plan.notes.push_back("assumed: unions of selected pages as with random weights");
  if (plan.fits() && !plan.memory.fits_at_most)
    plan.notes.push_back("fits as expected; not if chunks select as many pages as the rules allow");
  if (config.sequence.length > model.max_position_embeddings)
    plan.notes.push_back("sequence.length is above the model's max_position_embeddings " +
                         std::to_string(model.max_position_embeddings));
}

}  // namespace

FittedLayout fit_layout(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware) {
  const std::vector<Layout> layouts = possible_layouts(config);
  for (const Layout& layout : layouts) {
    MemoryPlan memory = plan_memory(config, model, hardware, layout);
    if (memory.fits()) return {layout, std::move(memory)};
  }
  const Layout& widest = *std::max_element(layouts.begin(), layouts.end(), [](const Layout& a, const Layout& b) {
    return a.group_workers < b.group_workers;
  });
  return {widest, plan_memory(config, model, hardware, widest)};
}

Plan make_plan(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
               const Calibration* calibration) {
  Plan plan;
  plan.run_name = config.run.name;
  plan.sequence_length = config.sequence.length;
  plan.sequences_per_step = config.train.sequences_per_step;
  plan.hardware = hardware;
  const Hardware shared = share_of(hardware, config.topology.workers);
  FittedLayout fitted = fit_layout(config, model, hardware);
  if (calibration != nullptr)
    plan.slowdown = slowdown_of(config, model, share_of(hardware, 1), calibration->nearest(config.sequence.length));
  plan.time = time_of(config, model, shared, fitted, plan.slowdown.value_or(1));
  const TrafficModel traffic(config, model, fitted.layout);
  plan.exchange = traffic.exchange();
  plan.traffic = traffic.step(fitted.memory);
  plan.ring = traffic.ring();
  plan.layout = fitted.layout;
  plan.memory = std::move(fitted.memory);
  LongestSequence longest = longest_sequence(config, model, hardware);
  plan.max_sequence = longest.tokens;
  plan.binds = plan.fits() ? longest.binds : plan.memory.problems.front();
  if (!plan.fits()) plan.changes = changes_to_fit(config, model, hardware, plan.max_sequence);
  if (hardware.peak > 0) {
    const double flops = model_flops_per_token(model, mean_keys(config)) * static_cast<double>(plan.tokens_per_step());
    plan.mfu = flops / plan.time.total / hardware.peak / static_cast<double>(plan.layout.workers);
  }
  add_notes(config, model, plan);
  return plan;
}

Plan load_plan(const RunConfig& config, const MachineFacts& facts, const Calibration* calibration) {
  const std::filesystem::path& file = config.topology.file;
  const std::string place = file.empty() ? "this machine" : file.string();
  const Topology topology = file.empty() ? Topology{.name = place} : load_topology(file);
  Hardware hardware = resolve(topology, facts, place);
  if (config.train.device == DeviceKind::kCpu && hardware.gpu) {
    Topology cpus = topology;
    cpus.gpus_per_node = Count::of(0);
    hardware = resolve(cpus, facts, place);
  }
  if (config.train.device == DeviceKind::kCuda && !hardware.gpu)
    throw InputError("train.device: cuda, and gpus_per_node of " + place + " is 0; allowed: auto, cpu, or GPUs there");
  check_degrees(config, hardware, place);
  const bool trained = !config.model.path.empty();
  const model::ModelConfig model = model::read_hf_config((trained ? config.model.path : config.model.config).string());
  return make_plan(config, model, hardware, calibration);
}

}  // namespace oomb::plan
