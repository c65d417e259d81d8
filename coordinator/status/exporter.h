// Prometheus' /metrics of a run: http://ADDRESS:PORT/metrics, served by threads of its own while the object lives.
//
// Gauges of the last step (sums over the cluster where they are bytes): oomb_step, oomb_last_step, oomb_loss,
// oomb_eval_loss, oomb_tokens_per_second, oomb_step_seconds, oomb_grad_norm, oomb_learning_rate, oomb_hbm_peak_bytes,
// oomb_host_peak_bytes, oomb_checkpoint_step, oomb_workers. Counters since the start of `oomb`: oomb_tokens_total,
// oomb_relaunches_total. All carry the label run.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "configs/run_config.h"

namespace oomb::status {

class Exporter {
 public:
  /// Listens, if status.port is not 0; else all members do nothing. InputError when the port cannot be had, or this
  /// build has no Prometheus.
  explicit Exporter(const RunConfig& config);
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;
  ~Exporter();

  /// `line` as it goes into metrics.jsonl.
  void step(const nlohmann::ordered_json& line);
  void checkpoint(std::int64_t step);
  void relaunch();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::status
