#include "coordinator/status/exporter.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "configs/error.h"

namespace oomb::status {
namespace {

struct GaugeOfKey {
  const char* key;  // of a line of metrics.jsonl
  const char* name;
  const char* help;
};

constexpr GaugeOfKey kGauges[] = {
    {"step", "oomb_step", "Last step done"},
    {"loss", "oomb_loss", "Loss of the last step, nats per token"},
    {"eval_loss", "oomb_eval_loss", "Held-out loss of the last evaluation, nats per token"},
    {"tokens_per_second", "oomb_tokens_per_second", "Tokens per second of the last step, over the cluster"},
    {"seconds", "oomb_step_seconds", "Seconds of the last step"},
    {"grad_norm", "oomb_grad_norm", "Norm of the last step's gradient"},
    {"lr", "oomb_learning_rate", "Learning rate of the last step"},
    {"hbm_peak_bytes", "oomb_hbm_peak_bytes", "Peak of device memory, over the cluster"},
    {"host_peak_bytes", "oomb_host_peak_bytes", "Peak of host memory, over the cluster"},
};

}  // namespace

struct Exporter::Impl {
  prometheus::Exposer exposer;
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::map<std::string, std::string> labels;
  std::map<std::string, prometheus::Gauge*> gauges;  // by key of metrics.jsonl
  prometheus::Gauge* checkpoint_step = nullptr;
  prometheus::Counter* tokens = nullptr;
  prometheus::Counter* relaunches = nullptr;

  Impl(const std::string& endpoint, const RunConfig& config) : exposer(endpoint, 1), labels{{"run", config.run.name}} {
    for (const GaugeOfKey& entry : kGauges) gauges[entry.key] = &gauge(entry.name, entry.help);
    checkpoint_step = &gauge("oomb_checkpoint_step", "Step of the last checkpoint made");
    gauge("oomb_last_step", "Step after which the run ends").Set(static_cast<double>(config.train.steps));
    gauge("oomb_workers", "Worker processes").Set(static_cast<double>(config.topology.workers));
    tokens = &counter("oomb_tokens_total", "Tokens trained on since the start of the program");
    relaunches = &counter("oomb_relaunches_total", "Launches after a lost worker");
    exposer.RegisterCollectable(registry);
  }

  prometheus::Gauge& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add(labels);
  }
  prometheus::Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry).Add(labels);
  }
};

Exporter::Exporter(const RunConfig& config) {
  if (config.status.port == 0) return;
  const std::string endpoint = config.status.address + ":" + std::to_string(config.status.port);
  try {
    impl_ = std::make_unique<Impl>(endpoint, config);
  } catch (const std::exception&) {
    throw InputError("status.port: cannot listen on " + endpoint +
                     "; allowed: a free port and an address of this machine, or 0 for none");
  }
}

Exporter::~Exporter() = default;

void Exporter::step(const nlohmann::ordered_json& line) {
  if (!impl_) return;
  for (const auto& [key, gauge] : impl_->gauges) {
    const auto entry = line.find(key);
    if (entry != line.end() && entry->is_number()) gauge->Set(entry->get<double>());
  }
  impl_->tokens->Increment(line.value("tokens", 0.0));
}

void Exporter::checkpoint(std::int64_t step) {
  if (impl_) impl_->checkpoint_step->Set(static_cast<double>(step));
}

void Exporter::relaunch() {
  if (impl_) impl_->relaunches->Increment();
}

}  // namespace oomb::status
