// Whole plans: the ready runs, the longest sequence, changes that make a run fit, calibration, the program itself.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "coordinator/plan/max_sequence.h"
#include "coordinator/plan/plan.h"
#include "coordinator/plan/report.h"
#include "tests/plan/error_of.h"

namespace oomb::plan {
namespace {

using nlohmann::json;
using Settings = std::vector<std::string>;

const char kConfigs[] = OOMB_SOURCE_FOLDER "/configs/";

RunConfig ready(const std::string& name, const Settings& settings = {}) {
  return load_run_config(kConfigs + name + ".yaml", settings);
}
MachineFacts machine() { return {{}, "here", {}, std::int64_t{24} << 30, 2, {}}; }
Plan plan_of(const RunConfig& config) { return load_plan(config, machine()); }

// The rule of the longest sequence, and sums that must hold for any plan.
void check(const RunConfig& config, const Plan& plan) {
  const auto fits_at = [&](std::int64_t length) {
    RunConfig changed = config;
    changed.sequence.length = length;
    return plan_of(changed).fits();
  };
  EXPECT_EQ(plan.max_sequence % config.sequence.chunk, 0);
  EXPECT_TRUE(plan.max_sequence == 0 || fits_at(plan.max_sequence));
  EXPECT_FALSE(fits_at(plan.max_sequence + config.sequence.chunk));
  EXPECT_FALSE(plan.binds.empty());

  const json j = json::parse(to_json(plan));
  for (const char* tier : {"hbm_bytes", "host_bytes"}) {
    std::int64_t sum = 0;
    for (const char* key : {"weights", "gradients", "optimizer", "activations", "pages", "staging"}) {
      EXPECT_GE(j[tier][key].get<std::int64_t>(), 0);
      sum += j[tier][key].get<std::int64_t>();
    }
    EXPECT_EQ(j[tier]["total"], sum) << tier;
  }
  EXPECT_EQ(j["tokens_per_step"], config.sequence.length * config.train.sequences_per_step);
  EXPECT_NEAR(
      j["tokens_per_second"].get<double>() * j["seconds_per_step"].get<double>() / j["tokens_per_step"].get<double>(),
      1, 1e-9);
  EXPECT_EQ(j["fits"], plan.fits());
  EXPECT_EQ(j["max_sequence"], plan.max_sequence);
  EXPECT_EQ(j["workers"], config.topology.workers);
  if (plan.fits()) {
    EXPECT_LE(plan.memory.total(Tier::kHbm), plan.memory.hbm_capacity);
    EXPECT_LE(plan.memory.total(Tier::kHost), plan.memory.host_capacity);
  }
}

TEST(Plan, ReadyRuns) {
  struct Row {
    const char* name;
    std::int64_t workers, groups;
    double tokens_per_second_low, tokens_per_second_high;
  };
  // Bounds: the floor of 8,900 tokens/s a GPU, a tenth better with kept attention outputs, and half of it.
  for (const Row& row : {Row{"qwen2.5-7b-256k-h200", 1, 1, 4450, 9790},
                         {"qwen2.5-7b-1m-h200", 1, 1, 4450, 9790},
                         {"qwen2.5-7b-4m-h200", 1, 1, 4450, 9790},
                         {"qwen2.5-7b-4m-8xh200", 8, 1, 8 * 4450, 8 * 9790},
                         {"qwen2.5-7b-64m-128nodes", 1024, 16, 1e6, 1024 * 9790}}) {
    SCOPED_TRACE(row.name);
    const RunConfig config = ready(row.name);
    const Plan plan = plan_of(config);
    EXPECT_TRUE(plan.fits()) << table(plan);
    EXPECT_EQ(plan.layout.workers, row.workers);
    EXPECT_EQ(plan.layout.groups(), row.groups);
    EXPECT_GT(plan.tokens_per_second(), row.tokens_per_second_low);
    EXPECT_LT(plan.tokens_per_second(), row.tokens_per_second_high);
    EXPECT_EQ(plan.traffic.total() > 0, row.workers > 1);
    EXPECT_TRUE(row.workers == 1 || plan.traffic.total() < plan.ring.total());
    EXPECT_GE(plan.max_sequence, config.sequence.length / config.sequence.chunk * config.sequence.chunk);
    check(config, plan);
  }
}

TEST(Plan, NearWhatOneH200Did) {
  // tests/bench/RESULTS.md, 2026-12-01. A plan knows no gaps between kernels, so it is the faster one, by up to 16 %.
  struct Row {
    Settings settings;
    double tokens_per_second, hbm_gib;
  };
  for (const Row& row : {Row{{}, 8603, 127.9},
                         {{"sequence.length=262144", "pipeline.activation_bytes=6GiB"}, 8076, 103.3},
                         {{"sequence.length=131072"}, 8117, 128.8},
                         {{"sequence.length=131072", "sequence.chunk=12288", "attention.budget_pages=4"}, 9477, 120.1},
                         {{"attention.kind=dense"}, 5810, 128.0},
                         {{"attention.kind=dense", "sequence.length=262144"}, 2386, 133.2}}) {
    Settings settings = row.settings;
    settings.emplace_back("topology.file=topologies/one-h200.yaml");
    const Plan plan = plan_of(ready("qwen2.5-7b-64k-h200", settings));
    EXPECT_TRUE(plan.fits());
    EXPECT_NEAR(plan.tokens_per_second() / row.tokens_per_second, 1.08, 0.08) << row.tokens_per_second;
    // The slack of 4 GiB was not used in full.
    const double gib = static_cast<double>(plan.memory.total(Tier::kHbm)) / (1 << 30);
    EXPECT_GT(gib, row.hbm_gib);
    EXPECT_LT(gib, row.hbm_gib + 10);
  }
}

TEST(Plan, DemosOnThisMachine) {
  for (const char* name : {"local", "copy"}) {
    const RunConfig config = ready(name);
    const Plan plan = plan_of(config);
    EXPECT_TRUE(plan.fits()) << table(plan);
    EXPECT_EQ(plan.memory.total(Tier::kHbm), 0);
    EXPECT_GT(plan.tokens_per_second(), 1000);
  }
}

TEST(Plan, ShowsTheInterfaceOfThisMachine) {
  MachineFacts facts = machine();
  facts.interfaces = {{"lo", "127.0.0.1", 8, true, true, 0}, {"eth0", "10.0.0.5", 24}};
  const Plan plan = load_plan(ready("local"), facts);
  EXPECT_NE(table(plan).find("note: network: lo (127.0.0.0/8) on 1 node\n"), std::string::npos) << table(plan);
}

TEST(Plan, ThousandGpusPlanQuickly) {
  const auto start = std::chrono::steady_clock::now();
  plan_of(ready("qwen2.5-7b-64m-128nodes"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Plan, HugeSequencesPlanQuicklyToo) {
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = plan_of(ready("qwen2.5-7b-64m-128nodes", {"sequence.length=34359738368"}));  // 8M chunks
  EXPECT_FALSE(plan.fits());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Plan, OddLengthsAndWorkers) {
  for (const std::int64_t length : {1, 127, 4096, 4097, 1'000'003}) {
    for (const std::int64_t workers : {1, 3, 7, 8}) {
      SCOPED_TRACE(std::to_string(length) + " tokens, " + std::to_string(workers) + " workers");
      const RunConfig config = ready("qwen2.5-7b-4m-8xh200", {"sequence.length=" + std::to_string(length),
                                                              "topology.workers=" + std::to_string(workers)});
      check(config, plan_of(config));
    }
  }
}

TEST(Plan, MoreOfAnythingNeverMakesItFit) {
  // A bound that holds with room has to hold with less of everything.
  const RunConfig base = ready("qwen2.5-7b-1m-h200");
  const std::int64_t longest = plan_of(base).max_sequence;
  const auto longest_with = [&](const Settings& settings) {
    return plan_of(ready("qwen2.5-7b-1m-h200", settings)).max_sequence;
  };
  EXPECT_LT(longest_with({"pages.host_bytes=40GiB"}), longest);
  EXPECT_LT(longest_with({"attention.kind=dense"}), longest);
  EXPECT_LT(longest_with({"pages.hbm_bytes=8GiB"}), longest);
  EXPECT_GT(longest_with({"pages.dtype=fp8"}), longest);
  EXPECT_GT(longest_with({"pages.grad_dtype=bf16"}), longest);
  EXPECT_LT(longest_with({"train.optimizer_state=fp32", "train.master_weights=auto"}), longest);
  EXPECT_EQ(longest_with({"train.compute_dtype=fp64", "train.optimizer_state=fp32", "train.master_weights=auto"}), 0)
      << "32 bytes a parameter";
}

TEST(Plan, EveryChangeThatIsNamedIsEnough) {
  const Settings cases[] = {
      {"train.optimizer_state=fp32"},
      {"train.optimizer_state=fp32", "train.master_weights=auto"},
      {"sequence.length=1310720"},
      {"pages.host_bytes=1GiB"},
      {"pages.hbm_bytes=200GiB", "sequence.length=4194304", "pages.host_bytes=1TiB"},
  };
  for (const Settings& settings : cases) {
    SCOPED_TRACE(settings[0]);
    const Plan plan = plan_of(ready("qwen2.5-7b-1m-h200", settings));
    EXPECT_FALSE(plan.fits());
    EXPECT_FALSE(plan.memory.problems.empty());
    EXPECT_FALSE(plan.changes.empty()) << table(plan);
    for (const std::string& change : plan.changes) {
      Settings more = settings;
      std::istringstream words(change);
      for (std::string word; words >> word;) more.push_back(word);
      EXPECT_TRUE(plan_of(ready("qwen2.5-7b-1m-h200", more)).fits()) << change;
    }
  }
}

TEST(Plan, DegreesThatDoNotFit) {
  std::string error = error_of([] { plan_of(ready("qwen2.5-7b-4m-8xh200", {"topology.workers=9"})); });
  EXPECT_NE(error.find("topology.workers: 9 workers"), std::string::npos) << error;
  EXPECT_NE(error.find("gpus_per_node 8"), std::string::npos) << error;
  error = error_of([] { plan_of(ready("qwen2.5-7b-64m-128nodes", {"train.sequences_per_step=15"})); });
  EXPECT_NE(error.find("topology.workers: 1024"), std::string::npos) << error;
  EXPECT_NE(error.find("train.sequences_per_step 15"), std::string::npos) << error;
  error = error_of([] { plan_of(ready("copy", {"sequence.length=1099511627776"})); });
  EXPECT_NE(error.find("sequence.length: 1099511627776 tokens"), std::string::npos) << error;
  EXPECT_NE(error.find("sequence.chunk 256"), std::string::npos) << error;
  error = error_of([] { plan_of(ready("local", {"train.device=cuda"})); });
  EXPECT_NE(error.find("train.device"), std::string::npos) << error;
  EXPECT_NE(error.find("gpus_per_node"), std::string::npos) << error;
  error = error_of([] { plan_of(ready("local", {"topology.file=none.yaml"})); });
  EXPECT_NE(error.find("none.yaml: no such topology file"), std::string::npos) << error;
}

TEST(Plan, GroupsFollowTheSequences) {
  const auto groups = [](std::int64_t sequences) {
    return plan_of(ready("qwen2.5-7b-4m-8xh200",
                         {"sequence.length=262144", "train.sequences_per_step=" + std::to_string(sequences)}))
        .layout.groups();
  };
  EXPECT_EQ(groups(1), 1);
  EXPECT_EQ(groups(2), 2);
  EXPECT_EQ(groups(8), 8);  // nothing to exchange but weight gradients
  EXPECT_EQ(groups(16), 8);
}

TEST(Calibration, CorrectsTheRates) {
  const RunConfig config = ready("qwen2.5-7b-256k-h200");
  const double simulated = plan_of(config).tokens_per_second();
  const Calibration half{"f", {{64, 1e9}, {262'144, simulated / 2}}};
  const Plan plan = load_plan(config, machine(), &half);
  ASSERT_TRUE(plan.slowdown.has_value());
  EXPECT_NEAR(*plan.slowdown, 2, 1e-6);
  EXPECT_NEAR(plan.tokens_per_second() / simulated, 0.5, 1e-6);
  // A multi-worker plan is slowed down by the same factor of its compute, not of its transfers.
  const Plan eight = load_plan(ready("qwen2.5-7b-4m-8xh200"), machine(), &half);
  EXPECT_GT(*eight.slowdown, 1.5);
}

TEST(Calibration, ReadsNestedMeasurements) {
  const Calibration c = parse_calibration(
      R"({"device": "x", "step": [{"length": 65536, "tokens_per_second": {"min": 1, "median": 7000}},
          {"sequence_length": 1048576, "tokens_per_second": 6500.5}], "tokens_per_second": 3})",
      "b.json");
  ASSERT_EQ(c.steps.size(), 2u);
  EXPECT_EQ(c.nearest(100'000).tokens_per_second, 7000);
  EXPECT_EQ(c.nearest(4 << 20).tokens_per_second, 6500.5);
  for (const char* bad :
       {"", "{", "[]", R"({"length": 5, "tokens_per_second": 0})", R"({"length": 5})",
        R"({"length": "5", "tokens_per_second": "fast"})", R"({"length": -5, "tokens_per_second": 1})"}) {
    EXPECT_TRUE(error_of([&] { parse_calibration(bad, "b.json"); }).starts_with("b.json: ")) << bad;
  }
  EXPECT_TRUE(error_of([] { read_calibration("/nonexistent/b.json"); }).starts_with("/nonexistent/b.json: "));
}

// --- the program ---------------------------------------------------------------------------------------------------

struct Output {
  int status = -1;
  std::string text;  // stdout and stderr
};
Output oomb(const std::string& arguments) {
  Output output;
  std::FILE* pipe = popen((std::string(OOMB_PROGRAM) + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> buffer{};
  for (std::size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) output.text.append(buffer.data(), n);
  const int status = pclose(pipe);
  output.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return output;
}

TEST(Program, TableAndJson) {
  const Output text = oomb(std::string("plan ") + kConfigs + "qwen2.5-7b-4m-8xh200.yaml");
  EXPECT_EQ(text.status, 0);
  for (const char* part : {"HBM of a worker", "K/V homes", "a ring's total", "it fits", "longest sequence", "assumed"})
    EXPECT_NE(text.text.find(part), std::string::npos) << part << " in\n" << text.text;
  // What does not fit is an answer, not an error; data that does not exist does not matter.
  const Output out =
      oomb(std::string("plan --json ") + kConfigs + "qwen2.5-7b-1m-h200.yaml --set sequence.length=8388608");
  EXPECT_EQ(out.status, 0);
  const json j = json::parse(out.text, nullptr, false);
  ASSERT_FALSE(j.is_discarded()) << out.text;
  EXPECT_EQ(j["fits"], false);
  EXPECT_GT(j["max_sequence"].get<std::int64_t>(), 0);
  EXPECT_GT(j["changes"].size(), 0u);
  EXPECT_EQ(j["network"]["bytes_per_step"], 0);
}

TEST(Program, BadInputIsOneLine) {
  const std::string run = std::string(kConfigs) + "qwen2.5-7b-1m-h200.yaml";
  for (const std::string& arguments :
       {std::string("plan /nonexistent.yaml"), "plan " + run + " --set topology.workers=2",
        "plan " + run + " --set topology.file=/nonexistent.yaml", "plan " + run + " --calibration /nonexistent.json",
        "plan " + run + " --set model.config=/nonexistent.json"}) {
    const Output out = oomb(arguments);
    EXPECT_EQ(out.status, 2) << arguments;
    EXPECT_EQ(std::count(out.text.begin(), out.text.end(), '\n'), 1) << out.text;
    EXPECT_TRUE(out.text.starts_with("error: ")) << out.text;
  }
}

TEST(Program, WhatCannotRunYetIsRefusedByName) {
  const std::string run = std::string(kConfigs) + "copy.yaml";
  for (const auto& [setting, field] : {std::pair{"pages.dtype=fp8", "pages.dtype"},
                                       {"pipeline.sequences_in_flight=2", "pipeline.sequences_in_flight"}}) {
    for (const char* command : {"train ", "eval "}) {
      const Output out = oomb(command + run + " --set " + setting);
      EXPECT_EQ(out.status, 2);
      EXPECT_TRUE(out.text.starts_with(std::string("error: ") + field + ": ")) << out.text;
    }
  }
}

TEST(Program, TrainRefusesWhatDoesNotFit) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "oomb-plan-refused";
  std::filesystem::remove_all(folder);
  const Output out = oomb("train " + std::string(kConfigs) +
                          "qwen2.5-7b-1m-h200.yaml --set sequence.length=8388608 --set run.dir=" + folder.string());
  EXPECT_EQ(out.status, 2) << out.text;
  EXPECT_NE(out.text.find("would fit with:"), std::string::npos) << out.text;
  EXPECT_NE(out.text.find("\nerror: the run does not fit: host memory"), std::string::npos) << out.text;
  EXPECT_FALSE(std::filesystem::exists(folder)) << "nothing is written for a run that is refused";
}

TEST(Program, PlanWhereTheHardwareIsKnown) {
  EXPECT_FALSE(plan_where_known(ready("local"), machine()).has_value());
  MachineFacts facts = machine();
  facts.gpus = {"Some Accelerator"};
  EXPECT_FALSE(plan_where_known(ready("local"), facts).has_value());
  facts.gpus = {"NVIDIA H200"};
  const std::optional<Plan> plan = plan_where_known(ready("local"), facts);
  ASSERT_TRUE(plan.has_value());
  EXPECT_NE(short_form(*plan).find("HBM"), std::string::npos);
  EXPECT_EQ(short_form(*plan).find('\n'), std::string::npos);
  EXPECT_FALSE(plan_where_known(ready("local", {"train.device=cpu"}), facts).has_value());
}

}  // namespace
}  // namespace oomb::plan
