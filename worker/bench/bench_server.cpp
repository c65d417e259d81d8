#include "worker/bench/bench_server.h"

#include <ATen/Parallel.h>

#include <nlohmann/json.hpp>

#include "configs/error.h"
#include "configs/this_machine.h"
#include "worker/bench/gradient_check.h"
#include "worker/bench/machine.h"
#include "worker/bench/measurements.h"
#include "worker/train/run_options.h"

namespace oomb::bench {

using nlohmann::json;

namespace {

// As a Trainer does before it computes anything.
TensorTypes prepare_device(const RunConfig& config) {
  const TensorTypes types = types_of(config);
  initialise_device(types.device);
  at::set_num_threads(static_cast<int>(config.train.threads > 0 ? config.train.threads : available_cores()));
  if (config.train.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  return types;
}

// Spelled as in run files.
std::string name_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return "fp64";
    case at::kFloat:
      return "fp32";
    case at::kBFloat16:
      return "bf16";
    default:
      return c10::toString(type);
  }
}

json mode_facts(const RunConfig& config, const model::ModelConfig& m, const PipelineOptions& options) {
  const attention::SelectionRule& rule = options.selection;
  json facts = {{"layers", m.num_layers},
                {"hidden_size", m.hidden_size},
                {"intermediate_size", m.intermediate_size},
                {"query_heads", m.num_heads},
                {"kv_heads", m.num_kv_heads},
                {"head_dim", m.head_dim},
                {"vocab_size", m.vocab_size},
                {"tied_embeddings", m.tie_word_embeddings},
                {"parameters", model::num_parameters(m)},
                {"compute_dtype", to_string(config.train.compute_dtype)},
                {"master_weights", to_string(config.train.master_weights)},
                {"optimizer_state", to_string(config.train.optimizer_state)},
                {"page_gradients", name_of(options.gradient_dtype)},
                {"deterministic", config.train.deterministic},
                {"sequences_per_step", config.train.sequences_per_step},
                {"chunk", options.chunk_tokens},
                {"page_tokens", rule.page_tokens},
                {"attention", to_string(config.attention.kind)}};
  if (!rule.dense) {
    facts["query_tile"] = rule.query_tile;
    facts["budget_pages"] = rule.budget_pages;
    facts["chunk_pages"] = rule.chunk_pages;
    facts["sink_pages"] = rule.sink_pages;
    facts["recent_pages"] = rule.recent_pages;
    facts["votes"] = to_string(config.attention.votes);
  }
  return facts;
}

}  // namespace

struct BenchServer::Impl {
  Impl(const RunConfig& run, TrainerEvents run_events)
      : config(run), events(std::move(run_events)), types(prepare_device(config)) {
    const std::filesystem::path& path = config.model.path.empty() ? config.model.config : config.model.path;
    model = model::read_hf_config(path.string());
    options = pipeline_options(config, types);
  }

  // Everything that has to be known, and right, before a speed is worth measuring.
  void set_up(const Repeats& repeats) {
    events.phase("checking gradients");
    const GradientCheck check = check_gradients(model, options, types);
    require_passed(check);
    events.phase("measuring ceilings");
    const Timer timer(types.device);
    const Ceilings ceilings = measure_ceilings(types, timer, repeats);
    const std::optional<StatedPeak> peak = stated_peak(types.device, types.compute);
    facts = {{"machine", machine_facts(types.device)},
             {"mode", mode_facts(config, model, options)},
             {"timing", {{"clock", timer.clock()}, {"flushed_cache_bytes", timer.flushed_bytes()}}},
             {"ceilings", ceilings.json()},
             {"check", check.json()}};
    facts["ceilings"]["stated_peak_flops"] = peak ? json(peak->flops) : json();
    facts["ceilings"]["stated_peak_source"] = peak ? json(peak->source) : json();
    bench = std::make_unique<Workbench>(Workbench{config, events, model, options, types, timer, ceilings, {}, {}, 0});
    if (peak) bench->stated_peak = peak->flops;
  }

  const RunConfig config;
  const TrainerEvents events;
  TensorTypes types;
  model::ModelConfig model;
  PipelineOptions options;
  json facts;
  std::unique_ptr<Workbench> bench;  // after set_up
};

BenchServer::BenchServer(const RunConfig& config, TrainerEvents events)
    : impl_(std::make_unique<Impl>(config, std::move(events))) {}

BenchServer::~BenchServer() = default;

std::string BenchServer::device() const { return impl_->types.device.str(); }
int64_t BenchServer::num_parameters() const { return model::num_parameters(impl_->model); }

json BenchServer::answer(const json& request) {
  const Repeats repeats{request.at("warmup"), request.at("repeats")};
  if (!impl_->bench) impl_->set_up(repeats);
  Workbench& bench = *impl_->bench;
  bench.repeats = repeats;
  bench.length = request.at("length");
  const std::string measure = request.at("measure");
  json answer = {{"facts", impl_->facts}};
  answer["facts"]["timing"]["warmup"] = repeats.warmup;
  answer["facts"]["timing"]["repeats"] = repeats.count;
  if (measure == "step") {
    answer["rows"] = measure_steps(bench);
  } else if (measure == "attention") {
    answer["rows"] = measure_attention(bench);
  } else if (measure == "select") {
    answer["rows"] = measure_selection(bench);
  } else if (measure == "kernels") {
    answer["rows"] = measure_kernels(bench);
  } else {
    throw std::runtime_error("the coordinator asked for an unknown measurement: " + measure);
  }
  return answer;
}

}  // namespace oomb::bench
