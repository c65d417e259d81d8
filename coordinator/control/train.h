// The two things a run does: train and eval.
#pragma once

#include <filesystem>
#include <string>

#include "configs/run_config.h"
#include "coordinator/launch/launcher.h"

namespace oomb::control {

/// Trains as `config` says, relaunching lost workers up to restart.max times; what happens is shown on stdout and
/// stderr. Returns the exit status of the program (run_error.h). `launcher` serves one launch after the other.
int train(const RunConfig& config, const std::filesystem::path& worker_program, launch::Launcher& launcher);

/// Evaluates the checkpoint that `config` goes on from; the result, {"loss", "tokens", "checkpoint"} as one line of
/// JSON or as words, goes to stdout, all else to stderr. Returns the exit status.
int evaluate(const RunConfig& config, const std::filesystem::path& worker_program, launch::Launcher& launcher,
             bool json);

}  // namespace oomb::control
