#include "coordinator/launch/process_launcher.h"

#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "comm/control_messages.h"
#include "configs/error.h"

namespace oomb::launch {
namespace {

bool is_program(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

std::filesystem::path find_in_path(const std::string& name, const char* package) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path candidate = std::filesystem::path(folder.empty() ? "." : folder) / name;
    if (is_program(candidate)) return candidate;
  }
  throw InputError(name + ": not found in PATH; it comes with " + package);
}

}  // namespace

ControlEndpoint loopback_endpoint() { return {"127.0.0.1", "127.0.0.1"}; }
ControlEndpoint network_endpoint(const std::string& host) { return {"0.0.0.0", host}; }

void ProcessLauncher::start_program(const std::vector<std::string>& arguments,
                                    const std::vector<EnvironmentSetting>& settings, const LaunchRequest& request,
                                    const char* package) {
  const std::filesystem::path program = find_in_path(arguments.front(), package);
  std::vector<std::string> environment = merged_environment(settings);
  const auto set = [&](const std::string& name, const std::string& value) {
    std::erase_if(environment, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    environment.push_back(name + "=" + value);
  };
  set(comm::kHostVariable, request.control_host);
  set(comm::kPortVariable, std::to_string(request.control_port));
  set(comm::kSecretVariable, request.control_secret);
  adopt_orphans();
  child_.reset();  // its end would take the new processes along
  child_ = std::make_unique<ChildProcess>(program, arguments, environment, request.output_file);
}

std::optional<LaunchExit> ProcessLauncher::exited() { return child_ ? child_->exited() : std::nullopt; }

void ProcessLauncher::stop(std::chrono::milliseconds grace) {
  if (child_) child_->stop(grace);
}

std::vector<std::string> ProcessLauncher::last_output() {
  return child_ ? child_->last_output() : std::vector<std::string>();
}

std::filesystem::path find_worker(const std::filesystem::path& self) {
  if (const char* chosen = std::getenv("OOMB_WORKER"); chosen != nullptr && *chosen != '\0') {
    if (!is_program(chosen)) throw InputError(std::string("OOMB_WORKER=") + chosen + ": not a program");
    return std::filesystem::absolute(chosen);
  }
  const std::filesystem::path folder = self.parent_path();
  for (const auto& candidate : {folder / "oomb-worker", folder.parent_path() / "libexec" / "oomb-worker"}) {
    if (is_program(candidate)) return candidate;
  }
  throw InputError((folder / "oomb-worker").string() +
                   ": the worker's program is missing; it is built where LibTorch is found, or set OOMB_WORKER");
}

}  // namespace oomb::launch
