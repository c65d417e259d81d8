#include "coordinator/control/launch_outcome.h"

#include "configs/error.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"

namespace oomb::control {

std::chrono::milliseconds shutdown_grace(const RunConfig& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.timeouts.shutdown_seconds * 1000));
}

void show_output(launch::Launcher& launcher, status::Reporter& reporter) {
  for (const std::string& line : launcher.last_output()) reporter.error("  | " + line);
}

int report_failures(status::Reporter& reporter, const std::function<int()>& body) {
  try {
    return body();
  } catch (const InputError& error) {
    reporter.error(error.what());
    return kBadInput;
  } catch (const ResourceError& error) {
    reporter.error(error.what());
    return kResource;
  } catch (const StoppedAtOnce& error) {
    reporter.warning(error.what());
    return 128 + stop_signal();
  } catch (const WorkerLost& error) {
    reporter.error(error.what());
    return kFailed;
  }
}

void with_workers(const RunConfig& config, const std::string& mode, const std::filesystem::path& worker_program,
                  launch::Launcher& launcher, status::Reporter& reporter,
                  const std::function<void(WorkerSession&)>& body) {
  WorkerSession session(config, mode, worker_program, {}, launcher, reporter);
  try {
    body(session);
  } catch (const WorkerLost&) {
    session.end(shutdown_grace(config));
    show_output(launcher, reporter);
    throw;
  } catch (const StoppedAtOnce&) {
    session.end(std::chrono::milliseconds(stop_at_once() ? 0 : 2000));
    throw;
  } catch (...) {
    session.end(shutdown_grace(config));  // killed at once, mpirun would leave its session files
    throw;
  }
}

}  // namespace oomb::control
