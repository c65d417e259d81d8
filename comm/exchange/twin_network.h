// The in-memory twin of the transport: W workers as threads of one process, and a network that misbehaves on purpose.
//
// One network thread delivers messages and carries out gets after delays drawn from a seed: the draw depends on (seed,
// sender, receiver, number of the message between the two) and not on how threads are scheduled. Different delays
// reorder messages and gets freely, which the real transports may do too.
//
// It also watches what no real network can: with mark_readable()/mark_freed() every get is checked when it starts and
// when it is carried out. A read of bytes that were never readable, are freed, or were freed and made readable again in
// between, is a violation; freed bytes are overwritten with 0xFB (-2.6e36 in fp32 and bf16).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/exchange/transport.h"

namespace oomb::comm {

struct TwinOptions {
  int num_workers = 1;
  std::uint64_t seed = 1;
  int max_delay_us = 0;  ///< each delivery takes 0..max, drawn evenly; 0: in order, at once
  int slow_rank = -1;    ///< deliveries from and to this worker take `slow_factor` times as long
  int slow_factor = 10;
  int duplicate_per_mille = 0;  ///< messages that arrive twice, to test the receivers
  double lost_seconds = 1.0;    ///< from lose() until the others are told
  std::int64_t max_queued_bytes = std::int64_t{256} << 20;
  bool check_reads = true;  ///< false: gets of registered memory are not checked against mark_readable()
};

class TwinNetwork {
 public:
  explicit TwinNetwork(const TwinOptions& options);
  ~TwinNetwork();
  TwinNetwork(const TwinNetwork&) = delete;
  TwinNetwork& operator=(const TwinNetwork&) = delete;

  /// The transport of a worker, owned by the network. CUDA memory is not supported.
  Transport& transport(int rank);

  /// From now on the worker is dead to the others: nothing from or to it is delivered, gets from it stay open. After
  /// lost_seconds the others' transports fail with PeerLost. Its own transport fails with Aborted at once.
  void lose(int rank);
  /// lose(rank) when `deliveries` messages and gets from or to it have been carried out from now on.
  void lose_after(int rank, std::int64_t deliveries);

  /// What was read that should not have been. Empty in a correct run.
  std::vector<std::string> violations() const;
  /// Deliveries carried out so far.
  std::int64_t deliveries() const;

 private:
  class Worker;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::comm
