#include "worker/cluster/mpi_group.h"

#include <string>

#include "comm/collectives/mpi_point_to_point.h"
#include "comm/collectives/nccl_collectives.h"
#include "comm/collectives/pairwise_collectives.h"
#include "comm/exchange/ucx_transport.h"
#include "configs/error.h"
#include "worker/tensor/glue.h"
#include "worker/train/run_options.h"

namespace oomb::cluster {

namespace {

void refuse_unsupported(const RunConfig& config, int size) {
  if (config.topology.workers != size) {
    throw InputError("topology.workers is " + std::to_string(config.topology.workers) + " and " + std::to_string(size) +
                     " were started; allowed: as many as the launcher starts");
  }
  if (size > 1 && config.exchange != Exchange::kAuto && config.exchange != Exchange::kPages) {
    throw InputError("exchange: " + std::string(to_string(config.exchange)) +
                     " is not supported yet; allowed: auto, pages");
  }
}

}  // namespace

std::unique_ptr<WorkerGroup> connect_over_mpi(MPI_Comm world, const RunConfig& config) {
  auto group = std::make_unique<WorkerGroup>();
  MPI_Comm_rank(world, &group->rank);
  MPI_Comm_size(world, &group->size);
  refuse_unsupported(config, group->size);
  if (group->size == 1) return group;

  // A lost peer is noticed by the transport; its collectives ask it while they wait. The group is not moved.
  const comm::FailureWatch watch = [g = group.get()]() -> const comm::Failure* {
    return g->transport ? g->transport->failure() : nullptr;
  };
  group->collectives = comm::make_pairwise_collectives(comm::make_mpi_point_to_point(world), watch);
  const double connect_seconds = config.timeouts.connect_seconds;
  comm::UcxOptions ucx;
  ucx.rank = group->rank;
  ucx.size = group->size;
  ucx.lost_seconds = config.timeouts.lost_seconds;
  ucx.connect_seconds = connect_seconds;
  group->transport = comm::make_ucx_transport(ucx, [&](const std::string& own) {
    return group->collectives->all_gather_bytes(own, comm::in_seconds(connect_seconds));
  });
  find_neighbours(*group, connect_seconds);
  const TensorTypes types = types_of(config, group->rank_here);
  if (types.device.is_cuda() && comm::nccl_available()) {
    comm::NcclOptions nccl;
    nccl.device = types.device.index();
    group->device_collectives = comm::make_nccl_collectives(group->collectives.get(), nccl, watch);
  }
  return group;
}

}  // namespace oomb::cluster
