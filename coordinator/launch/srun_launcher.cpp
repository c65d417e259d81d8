#include <unistd.h>

#include <algorithm>

#include "configs/error.h"
#include "coordinator/launch/process_launcher.h"
#include "coordinator/launch/slurm_allocation.h"

namespace oomb::launch {
namespace {

// srun ends the tasks of other nodes when it is told to, not when it is killed.
constexpr std::chrono::milliseconds kLeastGrace{2000};

class SrunLauncher : public ProcessLauncher {
 public:
  SrunLauncher(SlurmAllocation allocation, ControlEndpoint endpoint)
      : ProcessLauncher(std::move(endpoint)), allocation_(std::move(allocation)) {}

  void start(const LaunchRequest& request) override {
    check_tasks(allocation_, request.workers);
    std::vector<std::string> arguments = {
        "srun",
        "--mpi=pmix",  // without it each process would be rank 0 of 1
        "--kill-on-bad-exit=1",
        "--overlap",     // also inside an interactive step, and while a lost step is still being cleaned up
        "--export=ALL",  // the control channel's variables, even in a job that was submitted with --export=NONE
        "--ntasks=" + std::to_string(request.workers),
    };
    // Since Slurm 22.05 a step does not take this over from its job.
    if (!allocation_.cpus_per_task.empty()) arguments.push_back("--cpus-per-task=" + allocation_.cpus_per_task);
    arguments.push_back(request.worker.string());
    start_program(arguments, slurm_rank_environment(), request, "Slurm");
  }

  void stop(std::chrono::milliseconds grace) override { ProcessLauncher::stop(std::max(grace, kLeastGrace)); }

 private:
  SlurmAllocation allocation_;
};

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) throw InputError("this host has no name; set topology.control_host");
  return name;
}

}  // namespace

std::unique_ptr<Launcher> make_srun_launcher(const std::string& control_host) {
  std::optional<SlurmAllocation> allocation = slurm_allocation();
  if (!allocation) throw InputError("SLURM_JOB_ID is not set: not inside a Slurm job");
  ControlEndpoint endpoint = loopback_endpoint();
  if (!control_host.empty()) {
    endpoint = network_endpoint(control_host);
  } else if (allocation->nodes > 1 || !allocation->on_compute_node) {
    endpoint = network_endpoint(host_name());
  }
  return std::make_unique<SrunLauncher>(*std::move(allocation), std::move(endpoint));
}

}  // namespace oomb::launch
