// Stands in for the UCX backend in a build without UCX.
#include "comm/exchange/ucx_transport.h"

namespace oomb::comm {

bool ucx_available() { return false; }

std::unique_ptr<Transport> make_ucx_transport(const UcxOptions&, const AllGatherBytes&) {
  throw CommError("built without UCX: install libucx-dev (or load a UCX module) and configure again");
}

}  // namespace oomb::comm
