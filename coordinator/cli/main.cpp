// The program `oomb`: reads a run file, and trains, evaluates or shows what it says.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "configs/error.h"
#include "configs/run_config.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"
#include "coordinator/control/train.h"
#include "coordinator/launch/launcher.h"
#include "coordinator/status/run_status.h"

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
  bool json = false;
  bool reference = false;
};

void add_run_options(CLI::App& command, Arguments& arguments, bool required) {
  CLI::Option* file = command.add_option("RUN", arguments.run_file, "Run file (YAML)");
  if (required) file->required();
  command.add_option("--set", arguments.overrides, "Override a setting of the run file; may be repeated")
      ->type_name("SECTION.FIELD=VALUE")
      ->allow_extra_args(false);
}

int print(const std::string& text) {
  const bool written = std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  if (!written) std::perror("error: stdout");
  return written ? control::kSuccess : control::kResource;
}

int run(int argc, char** argv) {
  CLI::App app{"Trains decoder language models on very long sequences."};
  app.name("oomb");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("oomb ") + OOMB_VERSION);
  app.require_subcommand(1);
  Arguments arguments;
  CLI::App* train = app.add_subcommand("train", "Train as the run file says");
  CLI::App* evaluate = app.add_subcommand("eval", "Held-out loss of the run's checkpoint");
  CLI::App* config = app.add_subcommand("config", "Print the resolved run as JSON");
  CLI::App* show = app.add_subcommand("status", "What the run's folder tells: running or not, step, loss, checkpoint");
  add_run_options(*train, arguments, true);
  add_run_options(*show, arguments, true);
  add_run_options(*evaluate, arguments, true);
  add_run_options(*config, arguments, false);
  evaluate->add_flag("--json", arguments.json, "Print {\"loss\", \"tokens\", \"checkpoint\"} as one line");
  show->add_flag("--json", arguments.json, "Print one line of JSON");
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
  if (show->parsed()) {
    const status::RunStatus found = status::read_run_status(settings);
    return print((arguments.json ? status::status_json(found) : status::status_text(found)) + "\n");
  }

  control::catch_stop_signals();
  const std::filesystem::path worker = launch::find_worker(std::filesystem::read_symlink("/proc/self/exe"));
  const std::unique_ptr<launch::Launcher> launcher = launch::make_launcher(settings.topology.control_host);
  if (train->parsed()) return control::train(settings, worker, *launcher);
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
