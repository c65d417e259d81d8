// What tests of `oomb train` share: a tiny run of the fake worker in a folder of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/coordinator/oomb_process.h"

namespace oomb::testing {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;

class TrainTest : public ::testing::Test {
 protected:
  TrainTest() : run_file_(folder_.path() / "run.yaml"), run_dir_(folder_.path() / "out") {
    write_file(run_file_, R"(run: {dir: out}
model: {config: model.json}
data: {kind: copy}
train: {steps: 8}
restart: {max: 0}
timeouts: {heartbeat_seconds: 0.2, lost_seconds: 2, shutdown_seconds: 5, connect_seconds: 20}
)");
  }

  OombProcess start(const std::string& behaviour, std::vector<std::string> settings = {}, bool terminal = false) {
    std::vector<std::string> arguments = {"train", run_file_.string()};
    for (const std::string& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return OombProcess(folder_.path(), arguments, behaviour, {}, terminal);
  }

  std::vector<json> metrics() const { return read_json_lines(run_dir_ / "metrics.jsonl"); }

  std::vector<std::int64_t> metric_steps() const {
    std::vector<std::int64_t> steps;
    for (const json& line : metrics()) steps.push_back(line["step"]);
    return steps;
  }

  std::set<std::string> checkpoints() const {
    std::set<std::string> names;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(run_dir_ / "checkpoints", error)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  static std::vector<std::int64_t> steps_to(std::int64_t last) {
    std::vector<std::int64_t> steps;
    for (std::int64_t step = 1; step <= last; ++step) steps.push_back(step);
    return steps;
  }

  static bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
  static std::int64_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

  // The run is over and nothing of it is left.
  static void expect_no_family(OombProcess& process) {
    EXPECT_TRUE(process.wait_until([&] { return process.family().empty(); }, seconds(5)))
        << process.family().size() << " processes left";
  }

  TemporaryFolder folder_;
  fs::path run_file_;
  fs::path run_dir_;
};

}  // namespace oomb::testing
