// The transport over UCX: active messages for small bodies, ucp_get_nbx for memory.
//
// Creation is collective. UCX picks the network (InfiniBand, shared memory, TCP...) by UCX_TLS and UCX_NET_DEVICES;
// over RDMA a get does not involve the owner's processor, over TCP and shared memory the owner's progress thread serves
// it. The progress thread spins for a few tens of microseconds and then sleeps in poll().
//
// Environment (set for ranks by the launcher): UCX_POSIX_ERROR_HANDLING=y and UCX_SYSV_ERROR_HANDLING=y, without which
// endpoints that report errors do not use shared memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/exchange/transport.h"

namespace oomb::comm {

/// Gathers one text of every rank, in rank order, on all ranks (Collectives::all_gather_bytes).
using AllGatherBytes = std::function<std::vector<std::string>(const std::string& own)>;

struct UcxOptions {
  int rank = 0;
  int size = 1;
  double lost_seconds = 10.0;     ///< silence after which a peer is lost; a heartbeat goes out every fifth of it
  double connect_seconds = 60.0;  ///< for the first message of every peer
  double goodbye_seconds = 5.0;   ///< the destructor waits this long for the peers' destructors
  int max_gets_in_flight = 64;    ///< further gets are queued
  std::int64_t max_queued_bytes = std::int64_t{256} << 20;
};

/// Whether this build has UCX.
bool ucx_available();

/// Connects to all peers and returns when each has answered. CommError with the cause when UCX cannot start or a peer
/// does not answer in time. Destruction is collective too: it says goodbye, waits for the peers' goodbyes, and closes.
/// After a failure it closes at once.
std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options, const AllGatherBytes& all_gather);

}  // namespace oomb::comm
