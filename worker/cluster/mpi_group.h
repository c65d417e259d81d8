// Connects the ranks of an MPI job: UCX for pages, MPI and NCCL for collectives.
#pragma once

#include <mpi.h>

#include <memory>

#include "worker/cluster/worker_group.h"

namespace oomb::cluster {

/// Collective over `world`; returns a group of one when it has one rank. Throws InputError when the settings ask for
/// another number of workers or for an exchange that does not exist yet, and comm errors when a rank does not answer.
/// MPI is finalised after the group is gone.
std::unique_ptr<WorkerGroup> connect_over_mpi(MPI_Comm world, const RunConfig& config);

}  // namespace oomb::cluster
