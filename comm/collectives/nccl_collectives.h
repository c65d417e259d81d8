// Collectives on device memory over NCCL.
#pragma once

#include <memory>

#include "comm/collectives/collectives.h"

namespace oomb::comm {

struct NcclOptions {
  int device = 0;          ///< CUDA device of this rank
  void* stream = nullptr;  ///< cudaStream_t on which operations run, after what is queued there; null: one of its own
  double init_seconds = 120;  ///< NCCL's first connection is slow; looser than a step's deadline
};

/// Whether this build has NCCL.
bool nccl_available();

/// Collective over `bootstrap` (host memory), which distributes NCCL's id and carries all_gather_bytes(); it must
/// outlive the result. The communicator is non-blocking: each call is polled against its deadline, and a failure aborts
/// it.
std::unique_ptr<Collectives> make_nccl_collectives(Collectives* bootstrap, const NcclOptions& options,
                                                   FailureWatch watch);

}  // namespace oomb::comm
