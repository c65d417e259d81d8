// What collectives on host memory must give, for any backend: run on every rank, throws std::runtime_error with the
// first wrong value.
#pragma once

#include <cstdint>

#include "comm/collectives/collectives.h"

namespace oomb::comm::test {

/// Every operation, element type and some odd counts, zero too.
void check_collectives(Collectives& collectives, double deadline_seconds);
/// Reduce-scatter and all-gather of `count_per_rank` floats a rank.
void check_large(Collectives& collectives, std::int64_t count_per_rank, double deadline_seconds);

}  // namespace oomb::comm::test
