// Starting the workers of a run, and ending them for certain. How that is done (mpirun on this machine, srun in a Slurm
// allocation) is behind this interface.
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

/// Where workers of a launcher reach this process.
struct ControlEndpoint {
  std::string bind_address;  // numeric, for the coordinator's socket
  std::string host;          // name or address, for the workers
};

class Launcher {
 public:
  virtual ~Launcher() = default;

  virtual ControlEndpoint control_endpoint() const = 0;

  /// Starts the workers. InputError when the launcher's program is missing, or there is no room for that many workers
  /// in what the batch system has allocated.
  virtual void start(const LaunchRequest& request) = 0;

  /// How the launch ended, once it has; never blocks.
  virtual std::optional<LaunchExit> exited() = 0;

  /// Ends every process of the launch: asks, waits for up to `grace`, then kills. Returns when none is left (at most
  /// about 5 s after the grace).
  virtual void stop(std::chrono::milliseconds grace) = 0;

  /// The last lines that the launched processes printed, oldest first.
  virtual std::vector<std::string> last_output() = 0;
};

/// Inside a Slurm allocation srun, else mpirun. What either returns must be used by one thread, the one that ends last
/// in the process: the launched processes get a signal when that thread is gone. `control_host` is the setting
/// topology.control_host.
std::unique_ptr<Launcher> make_launcher(const std::string& control_host);

/// Workers on this machine, under Open MPI's mpirun from PATH.
std::unique_ptr<Launcher> make_mpirun_launcher(const std::string& control_host);

/// One worker for each task of the Slurm allocation that this process runs in, under srun --mpi=pmix. InputError when
/// there is no allocation.
std::unique_ptr<Launcher> make_srun_launcher(const std::string& control_host);

/// The worker's program: OOMB_WORKER if set, else beside the program `self` or in ../libexec of it. InputError when
/// there is none.
std::filesystem::path find_worker(const std::filesystem::path& self);

}  // namespace oomb::launch
