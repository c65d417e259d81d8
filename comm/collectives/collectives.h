// Collectives over W ranks, one memory kind per object. Every rank calls the same operations in the same order.
//
// n is the bytes of the whole vector, per rank:
//   reduce_scatter_sum, all_gather   W - 1 messages each way per piece, n * (W-1)/W bytes each way
//   all_reduce_sum                   both; a vector of at most 64 KiB goes to all peers whole, n * (W-1) bytes
//   broadcast                        n bytes each way at most
//   barrier                          ceil(log2 W) empty messages
// (pairwise backends; NCCL chooses its own.)
//
// Counts are in elements and may exceed 2^31. Buffers belong to the caller and are of memory(). A call returns when the
// result is in place. Errors: PeerLost, DeadlinePassed, Aborted (errors.h); after any of them the object is unusable
// and every later call throws, since ranks no longer agree on what comes next.
//
// Threads: one at a time; abort() from any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/errors.h"
#include "comm/memory_kind.h"

namespace oomb::comm {

/// bf16 moves but is not summed: sums of gradients are fp32 or wider.
enum class ElementType : std::uint8_t { kFloat32, kFloat64, kBFloat16, kInt64, kByte };
std::int64_t bytes_of(ElementType type);
const char* name_of(ElementType type);

/// Asked while waiting: a failure known from elsewhere (Transport::failure), null if there is none. This is how a
/// collective names a lost peer that its own library does not notice.
using FailureWatch = std::function<const Failure*()>;

class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual MemoryKind memory() const = 0;
  virtual std::string description() const = 0;

  /// receive[i] = sum over ranks r of send_r[rank() * count_per_rank + i]. `send` has size() * count_per_rank elements.
  /// `receive` may be the own slice of `send`, or not overlap it. The pairwise backends add in the order of ranks (fp32
  /// in fp64, rounded once), so the bits depend on nothing else; NCCL's bits repeat for the same machine and size.
  virtual void reduce_scatter_sum(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                                  Deadline deadline) = 0;
  /// receive[r * count_per_rank + i] = send_r[i]. `send` may be the own slice of `receive`.
  virtual void all_gather(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                          Deadline deadline) = 0;
  /// In place; every rank gets the same bits.
  virtual void all_reduce_sum(void* data, std::int64_t count, ElementType type, Deadline deadline) = 0;
  virtual void broadcast(void* data, std::int64_t count, ElementType type, int root, Deadline deadline) = 0;
  virtual void barrier(Deadline deadline) = 0;

  /// One text of each rank, of any length, in rank order. For bootstrap: host memory whatever memory() is.
  virtual std::vector<std::string> all_gather_bytes(const std::string& own, Deadline deadline) = 0;

  /// Every pending and later call throws Aborted.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace oomb::comm
