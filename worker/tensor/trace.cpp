#include "worker/tensor/trace.h"

#if OOMB_HAVE_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace oomb {

TraceRange::TraceRange(const char* name) {
  if (record_.isActive()) record_.before(name);
#if OOMB_HAVE_CUDA
  nvtxRangePushA(name);
#endif
}

TraceRange::~TraceRange() {
#if OOMB_HAVE_CUDA
  nvtxRangePop();
#endif
}

}  // namespace oomb
