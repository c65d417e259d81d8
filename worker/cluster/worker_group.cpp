#include "worker/cluster/worker_group.h"

#include <sched.h>
#include <unistd.h>

#include <vector>

#include "configs/error.h"

namespace oomb::cluster {

void WorkerGroup::abort(const std::string& reason) {
  if (transport) transport->abort(reason);
  if (device_collectives) device_collectives->abort(reason);
  if (collectives) collectives->abort(reason);
}

void WorkerGroup::agree(const std::string& error, double wait_seconds) {
  if (size == 1) {
    if (!error.empty()) throw InputError(error);
    return;
  }
  for (const std::string& text : collectives->all_gather_bytes(error, comm::in_seconds(wait_seconds))) {
    if (!text.empty()) throw InputError(text);
  }
}

void find_neighbours(WorkerGroup& group, double wait_seconds) {
  if (group.size == 1) return;
  // Ranks that a launcher has bound to cores of their own share nothing that must be divided.
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof(cores), &cores);
  std::string place = host;
  for (int core = 0; core < CPU_SETSIZE; ++core) place += CPU_ISSET(core, &cores) ? '1' : '0';
  const std::vector<std::string> places = group.collectives->all_gather_bytes(place, comm::in_seconds(wait_seconds));
  group.ranks_here = group.rank_here = 0;
  for (int rank = 0; rank < group.size; ++rank) {
    if (places[static_cast<size_t>(rank)] != place) continue;
    if (rank < group.rank) ++group.rank_here;
    ++group.ranks_here;
  }
}

}  // namespace oomb::cluster
