// From one launch of the workers to the exit status of the program: what every command does when something goes wrong.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

#include "configs/run_config.h"
#include "coordinator/control/worker_session.h"
#include "coordinator/launch/launcher.h"
#include "coordinator/status/reporter.h"

namespace oomb::control {

std::chrono::milliseconds shutdown_grace(const RunConfig& config);

/// What the workers printed last, for a failure that they could not report themselves.
void show_output(launch::Launcher& launcher, status::Reporter& reporter);

/// Runs `body`, and turns what it throws into a message and an exit status (run_error.h).
int report_failures(status::Reporter& reporter, const std::function<int()>& body);

/// Makes a session in `mode` that writes no files and hands it to `body`, which starts and finishes it. If `body`
/// throws, every process is ended before the exception goes on.
void with_workers(const RunConfig& config, const std::string& mode, const std::filesystem::path& worker_program,
                  launch::Launcher& launcher, status::Reporter& reporter,
                  const std::function<void(WorkerSession&)>& body);

}  // namespace oomb::control
