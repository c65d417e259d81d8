// The program `oomb`: reads a run file, and trains, evaluates or shows what it says.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "configs/error.h"
#include "configs/run_config.h"
#include "coordinator/control/bench.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"
#include "coordinator/control/supported.h"
#include "coordinator/control/train.h"
#include "coordinator/launch/launcher.h"
#include "coordinator/plan/report.h"

namespace oomb {
namespace {

constexpr char kFooter[] =
    "Settings: docs/config.md, or `oomb config --reference`.\n"
    "Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 end a run after the running step, with a checkpoint; a second Ctrl-C at once.\n"
    "Exit status: 0 done; 1 a worker was lost or failed; 2 bad input; 3 no space or memory; 128 + signal after a "
    "signal.";

struct Arguments {
  std::string run_file;
  std::vector<std::string> overrides;
  std::string calibration;
  bool json = false;
  bool reference = false;
  control::BenchRequest bench;
};

void add_run_options(CLI::App& command, Arguments& arguments, bool required) {
  CLI::Option* file = command.add_option("RUN", arguments.run_file, "Run file (YAML)");
  if (required) file->required();
  command.add_option("--set", arguments.overrides, "Override a setting of the run file; may be repeated")
      ->type_name("SECTION.FIELD=VALUE")
      ->allow_extra_args(false);
}

void add_bench_options(CLI::App& command, control::BenchRequest& request) {
  command.add_option("WHAT", request.measure, "step, attention, select or kernels")
      ->required()
      ->check(CLI::IsMember(control::kBenchMeasures));
  command.add_flag("--json", request.json, "Print everything, every repeat too, as one line of JSON");
  command.add_option("--repeats", request.repeats, "Timed repeats")->check(CLI::Range(1, 10000))->capture_default_str();
  command.add_option("--warmup", request.warmup, "Untimed repeats before")
      ->check(CLI::Range(0, 10000))
      ->capture_default_str();
  command
      .add_option(
          "--lengths", request.lengths,
          "Tokens of a sequence, separated by commas (default: sequence.length; select: also 4 and 16 times it)")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
}

int print(const std::string& text) {
  const bool written = std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  if (!written) std::perror("error: stdout");
  return written ? control::kSuccess : control::kResource;
}

int plan_run(const RunConfig& settings, const Arguments& arguments) {
  std::optional<plan::Calibration> measured;
  if (!arguments.calibration.empty()) measured = plan::read_calibration(arguments.calibration);
  const plan::Plan plan = plan::load_plan(settings, plan::this_machine(), measured ? &*measured : nullptr);
  return print(arguments.json ? plan::to_json(plan) + "\n" : plan::table(plan));
}

int run(int argc, char** argv) {
  CLI::App app{"Trains decoder language models on very long sequences."};
  app.name("oomb");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("oomb ") + OOMB_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return "error: " + std::string(error.what()) + "; allowed: what `oomb --help` or `oomb COMMAND --help` lists\n";
  });
  Arguments arguments;
  CLI::App* train = app.add_subcommand("train", "Train as the run file says");
  CLI::App* evaluate = app.add_subcommand("eval", "Held-out loss of the run's checkpoint");
  CLI::App* config = app.add_subcommand("config", "Print the resolved run as JSON");
  add_run_options(*train, arguments, true);
  add_run_options(*evaluate, arguments, true);
  CLI::App* bench =
      app.add_subcommand("bench", "Check gradients, then measure how fast the run's step is, or a part of it");
  add_run_options(*bench, arguments, true);
  add_bench_options(*bench, arguments.bench);
  CLI::App* plan = app.add_subcommand("plan", "Memory, speed and longest sequence of the run, before it starts");
  add_run_options(*config, arguments, false);
  add_run_options(*plan, arguments, true);
  plan->add_flag("--json", arguments.json, "Print the plan as JSON");
  plan->add_option("--calibration", arguments.calibration,
                   "Measured steps (JSON of `oomb bench`) to correct the rates");
  evaluate->add_flag("--json", arguments.json, "Print {\"loss\", \"tokens\", \"checkpoint\"} as one line");
  config->add_flag("--reference", arguments.reference, "Print all settings as Markdown instead");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error);
    return status == 0 ? control::kSuccess : control::kBadInput;
  }

  if (config->parsed() && arguments.reference) return print(config_reference());
  if (arguments.run_file.empty()) throw InputError("oomb config: RUN is missing; allowed: a run file, or --reference");
  const RunConfig settings = load_run_config(arguments.run_file, arguments.overrides);
  if (config->parsed()) return print(to_json(settings) + "\n");

  if (plan->parsed()) return plan_run(settings, arguments);

  control::refuse_unsupported(settings);
  control::catch_stop_signals();
  const std::filesystem::path worker = launch::find_worker(std::filesystem::read_symlink("/proc/self/exe"));
  const std::unique_ptr<launch::Launcher> launcher = launch::make_mpirun_launcher();
  if (train->parsed()) return control::train(settings, worker, *launcher);
  if (bench->parsed()) return control::bench(settings, arguments.bench, worker, *launcher);
  return control::evaluate(settings, worker, *launcher, arguments.json);
}

}  // namespace
}  // namespace oomb

int main(int argc, char** argv) {
  try {
    return oomb::run(argc, argv);
  } catch (const oomb::InputError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return oomb::control::kBadInput;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: internal: %s\n", error.what());
    return oomb::control::kFailed;
  }
}
