// The environment of launched processes, decided in this one place.
#pragma once

#include <string>
#include <vector>

namespace oomb::launch {

struct EnvironmentSetting {
  std::string name;
  std::string value;
  const char* reason;
};

/// What ranks on this machine need. A variable that the user has set already keeps the user's value; OMP_NUM_THREADS is
/// left to the worker, which knows train.threads.
std::vector<EnvironmentSetting> local_rank_environment(bool running_as_root);

/// What ranks that srun starts, on one or many nodes, need.
std::vector<EnvironmentSetting> slurm_rank_environment();

/// The calling process's environment as NAME=VALUE texts, with `settings` added where the name is not set yet.
std::vector<std::string> merged_environment(const std::vector<EnvironmentSetting>& settings);

}  // namespace oomb::launch
