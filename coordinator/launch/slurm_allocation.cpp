#include "coordinator/launch/slurm_allocation.h"

#include <charconv>
#include <cstdlib>

#include "configs/error.h"

namespace oomb::launch {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::int64_t count(const char* name, std::int64_t otherwise) {
  const std::string text = variable(name);
  if (text.empty()) return otherwise;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw InputError(std::string(name) + "=" + text + ": not a number; it is set by Slurm");
  return value;
}

}  // namespace

std::optional<SlurmAllocation> slurm_allocation() {
  SlurmAllocation allocation;
  allocation.job = variable("SLURM_JOB_ID");
  if (allocation.job.empty()) return std::nullopt;
  allocation.tasks = count("SLURM_NTASKS", 0);
  allocation.nodes = count("SLURM_JOB_NUM_NODES", 1);
  allocation.on_compute_node = !variable("SLURMD_NODENAME").empty();
  allocation.cpus_per_task = variable("SLURM_CPUS_PER_TASK");
  allocation.restarts = count("SLURM_RESTART_COUNT", 0);
  return allocation;
}

void check_tasks(const SlurmAllocation& allocation, std::int64_t workers) {
  // Without a number of tasks srun is told one, and says itself when there is no room.
  if (allocation.tasks == 0 || allocation.tasks == workers) return;
  throw InputError("topology.workers: " + std::to_string(workers) + ", but Slurm job " + allocation.job + " has " +
                   std::to_string(allocation.tasks) + " task(s) (SLURM_NTASKS); allowed: topology.workers=" +
                   std::to_string(allocation.tasks) + ", or a job of " + std::to_string(workers) + " task(s)");
}

}  // namespace oomb::launch
