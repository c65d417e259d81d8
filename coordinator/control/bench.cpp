#include "coordinator/control/bench.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "comm/control_messages.h"
#include "configs/error.h"
#include "coordinator/control/launch_outcome.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"
#include "coordinator/status/bench_table.h"

namespace oomb::control {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace message = comm::message;

std::vector<std::int64_t> lengths_of(const RunConfig& config, const BenchRequest& request) {
  const std::int64_t length = config.sequence.length;
  if (request.measure == "kernels") {
    if (!request.lengths.empty()) {
      throw InputError(
          "--lengths: kernels are measured at the size of a chunk; allowed: step, attention or select "
          "with --lengths, or kernels with --set sequence.chunk=TOKENS");
    }
    return {length};
  }
  if (!request.lengths.empty()) return request.lengths;
  if (request.measure == "select") return {length, 4 * length, 16 * length};
  return {length};
}

void refuse_unmeasurable(const RunConfig& config) {
  if (config.topology.workers != 1) {
    throw InputError("topology.workers: " + std::to_string(config.topology.workers) +
                     ": bench measures one worker; allowed: 1");
  }
}

// Results so far, in the order in which they are shown.
class Results {
 public:
  explicit Results(const BenchRequest& request) : request_(request) { all_["bench"] = request.measure; }

  void take(const json& answer) {
    const auto facts = answer.find("facts");
    const auto rows = answer.find("rows");
    if (facts == answer.end() || rows == answer.end() || !rows->is_array()) {
      throw WorkerLost("the worker broke the protocol: bench_done without facts and rows");
    }
    const bool first = !all_.contains("facts");
    if (first) {
      all_["facts"] = *facts;
      all_["complete"] = false;
      all_["rows"] = ordered_json::array();
    }
    for (const json& row : *rows) all_["rows"].push_back(ordered_json(row));
    if (request_.json) return;
    if (first) std::fputs(status::bench_facts_text(*facts).c_str(), stdout);
    std::fputs(status::bench_rows_text(request_.measure, *rows, first).c_str(), stdout);
    std::fflush(stdout);
  }

  void print(bool complete) {
    if (!request_.json || !all_.contains("facts")) return;
    all_["complete"] = complete;
    std::printf("%s\n", all_.dump().c_str());
  }

 private:
  const BenchRequest& request_;
  ordered_json all_;
};

void measure(const RunConfig& config, const BenchRequest& request, WorkerSession& session, Results& results) {
  session.start();
  for (const std::int64_t length : lengths_of(config, request)) {
    if (stop_signal() != 0) break;
    results.take(session.request({{"type", message::kBench},
                                  {"measure", request.measure},
                                  {"length", length},
                                  {"warmup", request.warmup},
                                  {"repeats", request.repeats}},
                                 message::kBenchDone));
  }
  session.finish();
}

}  // namespace

int bench(const RunConfig& config, const BenchRequest& request, const std::filesystem::path& worker_program,
          launch::Launcher& launcher) {
  status::Reporter reporter(stderr, config.log.level, config.log.every);
  return report_failures(reporter, [&] {
    refuse_unmeasurable(config);
    lengths_of(config, request);
    Results results(request);
    try {
      with_workers(config, "bench", worker_program, launcher, reporter,
                   [&](WorkerSession& session) { measure(config, request, session, results); });
    } catch (...) {
      results.print(/*complete=*/false);
      throw;
    }
    const int signal = stop_signal();
    results.print(/*complete=*/signal == 0);
    if (signal != 0) return 128 + signal;
    return std::fflush(stdout) == 0 ? static_cast<int>(kSuccess) : static_cast<int>(kResource);
  });
}

}  // namespace oomb::control
