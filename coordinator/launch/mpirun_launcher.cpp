#include <unistd.h>

#include "coordinator/launch/process_launcher.h"

namespace oomb::launch {
namespace {

class MpirunLauncher : public ProcessLauncher {
 public:
  using ProcessLauncher::ProcessLauncher;

  void start(const LaunchRequest& request) override {
    // Unbound: a worker uses all the cores that train.threads gives it; there may be more workers than cores. The
    // worker reports its own failures.
    start_program({"mpirun", "--quiet", "--bind-to", "none", "--oversubscribe", "-np", std::to_string(request.workers),
                   request.worker.string()},
                  local_rank_environment(geteuid() == 0), request, "Open MPI (Debian: openmpi-bin)");
  }
};

}  // namespace

std::unique_ptr<Launcher> make_mpirun_launcher(const std::string& control_host) {
  return std::make_unique<MpirunLauncher>(control_host.empty() ? loopback_endpoint() : network_endpoint(control_host));
}

}  // namespace oomb::launch
