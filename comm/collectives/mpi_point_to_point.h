// Pairwise sends and receives over MPI.
#pragma once

#include <mpi.h>

#include <memory>

#include "comm/collectives/point_to_point.h"

namespace oomb::comm {

/// Duplicates `communicator` (collective). MPI must be initialised with at least MPI_THREAD_SERIALIZED if more than one
/// thread calls it, and finalised after this object is gone. MPI's errors come back as CommError, not as an abort; what
/// is still under way when the object is destroyed after a failure is left to the end of the process.
std::unique_ptr<PointToPoint> make_mpi_point_to_point(MPI_Comm communicator);

}  // namespace oomb::comm
