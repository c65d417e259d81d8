// Pairwise sends and receives between threads of one process: the twin of MPI for tests.
#pragma once

#include <memory>
#include <vector>

#include "comm/collectives/point_to_point.h"

namespace oomb::comm {

/// One end per rank, each for one thread. They share mailboxes; a send is complete when its bytes were copied.
std::vector<std::unique_ptr<PointToPoint>> make_twin_point_to_point(int size);

}  // namespace oomb::comm
