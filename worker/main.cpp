// oomb-worker: one process of a run. The coordinator starts it (through mpirun or srun) and tells it what to do.
#include <mpi.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "configs/error.h"
#include "worker/cluster/mpi_group.h"
#include "worker/tensor/glue.h"
#include "worker/train/control_loop.h"

namespace {

// Workers end with their launcher: an orphan would keep a GPU. The check covers a launcher that died before the call.
void die_with_parent() {
  const pid_t parent = getppid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
}

// Under Slurm every process must be a rank of one MPI job; without PMIx each would believe to be rank 0 of 1.
void check_world(int size) {
  const char* tasks = std::getenv("SLURM_NTASKS");
  const char* step = std::getenv("SLURM_STEP_ID");
  if (tasks == nullptr || step == nullptr || std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) return;
  if (std::to_string(size) != tasks) {
    throw oomb::InputError("SLURM_NTASKS is " + std::string(tasks) + " but MPI sees " + std::to_string(size) +
                           " process(es); start workers with srun --mpi=pmix or with mpirun");
  }
}

}  // namespace

int main(int argc, char** argv) {
  die_with_parent();
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int status = 1;
  try {
    check_world(size);
    status = oomb::serve_coordinator(rank, size, [](const oomb::RunConfig& config) {
      return oomb::cluster::connect_over_mpi(MPI_COMM_WORLD, config);
    });
  } catch (const oomb::InputError& error) {
    std::cerr << "oomb-worker: " << error.what() << "\n";
    status = 2;
  } catch (const std::exception& error) {
    std::cerr << "oomb-worker: " << error.what() << "\n";
  }
  // After a failure the others may be anywhere: MPI's own end would wait for them.
  if (status == 0 || size == 1) MPI_Finalize();
  oomb::end_process(status);
}
