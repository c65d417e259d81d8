// The connections of one worker to the others of its run.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/collectives/collectives.h"
#include "comm/exchange/transport.h"
#include "configs/run_config.h"

namespace oomb::cluster {

/// A group of one has no connections: all pointers are null. Made collectively, destroyed collectively.
struct WorkerGroup {
  int rank = 0, size = 1;
  int ranks_here = 1;                                     ///< workers that share this machine and the cores of this one
  int rank_here = 0;                                      ///< number of this one among them
  std::unique_ptr<comm::Transport> transport;             ///< pages and gradients of pages
  std::unique_ptr<comm::Collectives> collectives;         ///< on host memory
  std::unique_ptr<comm::Collectives> device_collectives;  ///< on the GPU; null: through host memory

  /// Fails every wait of this worker's: it gives up. The others see silence or a closed connection.
  void abort(const std::string& reason);
  /// Ends collectively an operation that each rank tried for itself: `error` is "" where it went well. Throws
  /// InputError on every rank with the text of the lowest rank where it did not.
  void agree(const std::string& error, double wait_seconds);
};

/// How a worker that has learnt its run's settings connects to the others.
using Connect = std::function<std::unique_ptr<WorkerGroup>(const RunConfig&)>;

/// Fills ranks_here and rank_here. Collective.
void find_neighbours(WorkerGroup& group, double wait_seconds);

}  // namespace oomb::cluster
