// The worker's side of the control channel: answers what the coordinator asks until it says finish.
#pragma once

#include "worker/cluster/worker_group.h"

namespace oomb {

/// Connects as told by the environment (comm/control_messages.h) and serves. Returns the process's exit status: 0 after
/// finish, 2 after an input error, 3 when memory or disk did not suffice, 1 otherwise. Errors have then been reported
/// to the coordinator. If the channel is lost the process ends at once: nobody is left to hear about its work.
/// `connect` makes the connections to the other workers when the settings are known.
int serve_coordinator(int rank, int size, const cluster::Connect& connect);

}  // namespace oomb
