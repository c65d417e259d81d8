#include "configs/this_machine.h"
#include "worker/bench/measurements.h"
#include "worker/bench/model_flops.h"
#include "worker/bench/statistics.h"
#include "worker/train/device_memory.h"

namespace oomb::bench {

namespace {

using nlohmann::json;

RunConfig config_for(const Workbench& bench) {
  RunConfig config = bench.config;
  config.sequence.length = bench.length;
  config.eval.every = 0;
  config.profile.step = 0;
  return config;
}

json speed_fields(const Workbench& bench, const std::vector<double>& seconds, double tokens, double sequences) {
  const double typical = median(seconds);
  const double flops = sequences * model_flops(bench.model, bench.options, bench.length);
  json row;
  row["tokens_per_second"] = tokens / typical;
  row["tokens_per_second_min"] = tokens / *std::max_element(seconds.begin(), seconds.end());
  row["tokens_per_second_max"] = tokens / *std::min_element(seconds.begin(), seconds.end());
  row["model_flops"] = flops;
  row["model_flops_per_second"] = flops / typical;
  row["of_gemm"] = flops / typical / bench.ceilings.gemm_rate;
  row["mfu"] = bench.stated_peak ? json(flops / typical / *bench.stated_peak) : json();
  return row;
}

}  // namespace

json measure_steps(const Workbench& bench) {
  reset_peak_device_bytes(bench.types.device);
  reset_peak_host_bytes();
  Trainer trainer(config_for(bench), Trainer::Mode::measure, bench.events);
  std::vector<double> seconds, pass1, pass2, optimizer, loss, norm;
  StepReport report;
  for (int64_t step = 1; step <= bench.repeats.warmup + bench.repeats.count; ++step) {
    report = trainer.run_step(step);
    if (step <= bench.repeats.warmup) continue;
    seconds.push_back(report.seconds);
    pass1.push_back(report.pass1_seconds);
    pass2.push_back(report.pass2_seconds);
    optimizer.push_back(report.optimizer_seconds);
    loss.push_back(report.loss);
    norm.push_back(report.gradient_norm);
  }
  json row = speed_fields(bench, seconds, static_cast<double>(report.tokens),
                          static_cast<double>(bench.config.train.sequences_per_step));
  row["length"] = bench.length;
  row["tokens"] = report.tokens;
  row["labels"] = report.labels;
  row["notes"] = trainer.summary();
  row["seconds"] = seconds;
  row["pass1_seconds"] = pass1;
  row["pass2_seconds"] = pass2;
  row["optimizer_seconds"] = optimizer;
  row["loss"] = loss;
  row["grad_norm"] = norm;
  row["hbm_peak_bytes"] = report.hbm_peak_bytes;
  row["host_peak_bytes"] = report.host_peak_bytes;
  row["page_fast_peak_bytes"] = report.page_fast_bytes;
  row["page_host_peak_bytes"] = report.page_host_bytes;
  return json::array({row});
}

}  // namespace oomb::bench
