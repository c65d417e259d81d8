// `oomb bench`: one worker is started, checks itself, and measures (worker/bench/bench_server.h says what it answers).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "coordinator/launch/launcher.h"

namespace oomb::control {

inline const std::vector<std::string> kBenchMeasures = {"step", "attention", "select", "kernels"};

struct BenchRequest {
  std::string measure;                // one of kBenchMeasures
  std::vector<std::int64_t> lengths;  // tokens of a sequence; empty: a default that depends on the measure
  std::int64_t warmup = 2;
  std::int64_t repeats = 5;
  bool json = false;
};

/// Measures one length after the other. Tables, or one line of JSON, go to stdout, all else to stderr; no file is
/// written. When a later length fails, what was measured before is still printed ("complete": false in JSON). Returns
/// the exit status of the program (run_error.h).
int bench(const RunConfig& config, const BenchRequest& request, const std::filesystem::path& worker_program,
          launch::Launcher& launcher);

}  // namespace oomb::control
