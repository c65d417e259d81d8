// Collectives on host memory by direct exchange between pairs of ranks, over MPI or between threads.
//
// Every wait knows whose message it waits for, so errors name a rank, and sums are in the order of ranks whatever
// arrives first. Scratch memory: kScratchBytes.
#pragma once

#include <memory>

#include "comm/collectives/collectives.h"
#include "comm/collectives/point_to_point.h"

namespace oomb::comm {

inline constexpr std::int64_t kScratchBytes = std::int64_t{16} << 20;

/// `watch` may be empty.
std::unique_ptr<Collectives> make_pairwise_collectives(std::unique_ptr<PointToPoint> network, FailureWatch watch);

}  // namespace oomb::comm
