// The worker's side of `oomb bench`: answers bench requests (comm/control_messages.h).
//
// Every answer has the same `facts`, all found before the first speed is measured:
//   machine    machine.h
//   mode       what the run computes: model sizes, attention kind, P, T, B, M, C, formats, deterministic
//   timing     clock, flushed_cache_bytes, warmup, repeats
//   ceilings   copy_bytes, copy_bytes_per_second, gemm_size, gemm_flops_per_second; stated_peak_flops and
//              stated_peak_source (null where the maker's figure is not known here)
//   check      gradient_check.h; a check that fails ends the bench
// and `rows`. A step row has the fields of step_bench.h. All others have op, shape, seconds (every repeat), and what
// can be counted of bytes, flops, bytes_per_second, flops_per_second (of the median) and share (of the measured
// ceiling).
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "configs/run_config.h"
#include "worker/train/trainer.h"

namespace oomb::bench {

/// Not thread-safe. InputError for what a user can put right.
class BenchServer {
 public:
  BenchServer(const RunConfig& config, TrainerEvents events);
  ~BenchServer();

  std::string device() const;
  int64_t num_parameters() const;

  /// The fields of bench_done.
  nlohmann::json answer(const nlohmann::json& request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::bench
