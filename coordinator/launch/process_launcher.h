// What launchers share: one program that starts the workers and stays until they have ended.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "coordinator/launch/child_process.h"
#include "coordinator/launch/launcher.h"
#include "coordinator/launch/rank_environment.h"

namespace oomb::launch {

class ProcessLauncher : public Launcher {
 public:
  explicit ProcessLauncher(ControlEndpoint endpoint) : endpoint_(std::move(endpoint)) {}

  ControlEndpoint control_endpoint() const override { return endpoint_; }
  std::optional<LaunchExit> exited() override;
  void stop(std::chrono::milliseconds grace) override;
  std::vector<std::string> last_output() override;

 protected:
  /// Runs arguments[0], found in PATH, in this process's environment with `settings` (where not set yet) and the
  /// control channel of `request` added. `package` says in the error where the program comes from.
  void start_program(const std::vector<std::string>& arguments, const std::vector<EnvironmentSetting>& settings,
                     const LaunchRequest& request, const char* package);

 private:
  ControlEndpoint endpoint_;
  std::unique_ptr<ChildProcess> child_;
};

/// 127.0.0.1 on both sides, or all interfaces and `host`.
ControlEndpoint loopback_endpoint();
ControlEndpoint network_endpoint(const std::string& host);

}  // namespace oomb::launch
