// How the optimizer's work is divided over the workers of a run: of every parameter, rank r updates one contiguous
// shard. Gradients are reduce-scattered into it, updated weights are gathered from it.
//
// Shards begin at multiples of the moment block, whose elements share a scale (kernels/moment_code.h); so the bits of
// an update do not depend on the number of workers, given the same gradients.
//
// Cost per parameter of n elements, each way and rank: n (W-1)/W gradients in acc, n (W-1)/W weights. Scratch memory:
// at most kScratchBytes for a piece of all ranks' shards, and another of one rank's.
//
// Every worker holds the optimizer state of all elements, of which only its own shard is current between
// gather_state() calls: memory is not divided yet.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "comm/collectives/collectives.h"
#include "worker/model/parameters.h"

namespace oomb {

/// Elements [begin, begin + count) of a parameter.
struct ElementRange {
  int64_t begin = 0, count = 0;
};
/// Multiples of kMomentBlock but for the end; ranks at the end may have none.
ElementRange shard_of(int64_t num_elements, int rank, int size);

class ParameterShards {
 public:
  /// `collectives` on the parameters' device or in host memory; it must outlive this.
  ParameterShards(comm::Collectives* collectives, double wait_seconds)
      : collectives_(collectives), wait_seconds_(wait_seconds) {}

  ElementRange range_of(const model::Parameter& p) const {
    return shard_of(p.weight.numel(), collectives_->rank(), collectives_->size());
  }
  /// Sums gradients over workers: afterwards the own shard of each is whole, and the rest undefined.
  void reduce_gradients(model::Parameters& parameters) const;
  /// Sum over workers; the same bits on each.
  double sum(double own) const;
  /// Own shards of the weights to all workers.
  void gather_weights(model::Parameters& parameters) const;
  /// The same for masters and moments, so that every worker has the whole state: before a checkpoint.
  void gather_state(model::Parameters& parameters) const;

  static constexpr int64_t kScratchBytes = int64_t{16} << 20;

 private:
  void reduce(at::Tensor& values) const;
  void gather(at::Tensor& values, int64_t elements_per_value = 1) const;
  at::TensorOptions scratch_options(const at::Tensor& values) const;
  comm::Deadline deadline() const { return comm::in_seconds(wait_seconds_); }

  comm::Collectives* collectives_;
  double wait_seconds_;
};

}  // namespace oomb
