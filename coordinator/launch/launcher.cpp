#include "coordinator/launch/launcher.h"

#include "coordinator/launch/slurm_allocation.h"

namespace oomb::launch {

std::unique_ptr<Launcher> make_launcher(const std::string& control_host) {
  return slurm_allocation() ? make_srun_launcher(control_host) : make_mpirun_launcher(control_host);
}

}  // namespace oomb::launch
