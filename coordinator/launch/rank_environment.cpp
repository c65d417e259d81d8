#include "coordinator/launch/rank_environment.h"

#include <unistd.h>

#include <cstdlib>

namespace oomb::launch {

std::vector<EnvironmentSetting> local_rank_environment(bool running_as_root) {
  std::vector<EnvironmentSetting> settings = {
      {"OMPI_MCA_mpi_yield_when_idle", "1", "ranks that wait leave the cores to those that compute"},
      {"OMPI_MCA_pml", "ob1", "MPI carries small collectives only; UCX belongs to the page exchange"},
      {"OMPI_MCA_btl", "self,tcp", "no shared memory segments that a killed rank would leave behind"},
      {"OMPI_MCA_btl_tcp_if_include", "lo", "ranks of one machine do not depend on its network"},
      {"OMPI_MCA_oob_tcp_if_include", "lo", "the same for the launcher's own connections"},
      {"UCX_NET_DEVICES", "lo", "the same for pages, where they do not go through shared memory"},
      {"UCX_POSIX_ERROR_HANDLING", "y", "without it UCX does not use shared memory for connections that report errors"},
      {"UCX_SYSV_ERROR_HANDLING", "y", "the same for its other kind of shared memory"},
      {"UCX_WARN_UNUSED_ENV_VARS", "n", "the settings above are for every machine, also one without such transports"},
      {"GOMP_SPINCOUNT", "2000",
       "compute threads that wait soon sleep: endless spinning is 5 times slower on a machine that is shared"},
  };
  settings.push_back({"PYTORCH_ALLOC_CONF", "expandable_segments:True",
                      "device memory that activations leave can become page segments without a gap"});
  if (running_as_root) {
    settings.push_back({"OMPI_ALLOW_RUN_AS_ROOT", "1", "Open MPI refuses root, as in a container, without it"});
    settings.push_back({"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", "Open MPI asks twice"});
  }
  return settings;
}

std::vector<std::string> merged_environment(const std::vector<EnvironmentSetting>& settings) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) merged.emplace_back(*entry);
  for (const EnvironmentSetting& setting : settings) {
    if (std::getenv(setting.name.c_str()) == nullptr) merged.push_back(setting.name + "=" + setting.value);
  }
  return merged;
}

}  // namespace oomb::launch
