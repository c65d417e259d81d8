// What this machine can do at best, measured in the same process as what is compared with it.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "worker/bench/timer.h"
#include "worker/tensor/glue.h"

namespace oomb::bench {

struct Ceilings {
  int64_t copy_bytes = 0;  ///< of the buffer copied
  double copy_rate = 0;    ///< bytes read and written per second
  int64_t gemm_size = 0;   ///< a product of two square matrices of this size in the compute dtype
  double gemm_rate = 0;    ///< FLOP/s
  nlohmann::json json() const;
};

/// Median of the repeats.
Ceilings measure_ceilings(const TensorTypes& types, const Timer& timer, const Repeats& repeats);

}  // namespace oomb::bench
