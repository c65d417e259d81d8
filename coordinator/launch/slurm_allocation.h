// The Slurm job that this process runs in, as Slurm's environment variables tell it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace oomb::launch {

struct SlurmAllocation {
  std::string job;               // SLURM_JOB_ID
  std::int64_t tasks = 0;        // SLURM_NTASKS; 0: the job did not say
  std::int64_t nodes = 1;        // SLURM_JOB_NUM_NODES
  bool on_compute_node = false;  // this process is on a node of the job, not on a login node (SLURMD_NODENAME)
  std::string cpus_per_task;     // SLURM_CPUS_PER_TASK, or empty
  std::int64_t restarts = 0;     // SLURM_RESTART_COUNT
};

/// Nothing outside a job. InputError when a variable that must be a number is none.
std::optional<SlurmAllocation> slurm_allocation();

/// InputError unless `workers` is the number of tasks that the job asked for.
void check_tasks(const SlurmAllocation& allocation, std::int64_t workers);

}  // namespace oomb::launch
