// Starting the workers of a run, and ending them for certain. How that is done (mpirun here) is behind this interface.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace oomb::launch {

struct LaunchRequest {
  std::filesystem::path worker;  // program to start
  int workers = 1;
  // The control channel, handed over in the environment only.
  std::string control_host;
  std::uint16_t control_port = 0;
  std::string control_secret;
  std::filesystem::path output_file;  // what the workers print is appended here; empty: kept nowhere but in last_output
};

/// How the launcher's process ended.
struct LaunchExit {
  int code = 0;    // exit status; 128 + signal when ended by one
  int signal = 0;  // 0: ended by itself
  std::string text() const;
};

class Launcher {
 public:
  virtual ~Launcher() = default;

  /// Starts the workers. InputError when the launcher's program is missing.
  virtual void start(const LaunchRequest& request) = 0;

  /// How the launch ended, once it has; never blocks.
  virtual std::optional<LaunchExit> exited() = 0;

  /// Ends every process of the launch: asks, waits for up to `grace`, then kills. Returns when none is left (at most
  /// about 5 s after the grace).
  virtual void stop(std::chrono::milliseconds grace) = 0;

  /// The last lines that the launched processes printed, oldest first.
  virtual std::vector<std::string> last_output() = 0;
};

/// Workers on this machine, under Open MPI's mpirun from PATH. Must be used by one thread, the one that ends last in
/// the process: the launched processes get a signal when that thread is gone.
std::unique_ptr<Launcher> make_mpirun_launcher();

/// The worker's program: OOMB_WORKER if set, else beside the program `self` or in ../libexec of it. InputError when
/// there is none.
std::filesystem::path find_worker(const std::filesystem::path& self);

}  // namespace oomb::launch
