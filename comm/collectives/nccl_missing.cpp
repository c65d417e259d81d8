// Stands in for the NCCL backend in a build without NCCL.
#include "comm/collectives/nccl_collectives.h"

namespace oomb::comm {

bool nccl_available() { return false; }

std::unique_ptr<Collectives> make_nccl_collectives(Collectives*, const NcclOptions&, FailureWatch) {
  throw CommError("built without NCCL: configure with a CUDA toolkit and NCCL_ROOT");
}

}  // namespace oomb::comm
