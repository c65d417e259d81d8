// What workers of one context-parallel group send each other: small messages, and one-sided gets of registered memory.
//
// Each worker has one Transport. Behind it stands one progress thread that owns the network, serves peers and calls the
// sink; it never waits for a thread of the application. Backends: UCX (ucx_transport.h), threads of one process with
// injected faults (twin_network.h).
//
// Failures. A transport watches its peers by heartbeats of its own, since a stopped process or a cut link shows no
// error on most networks. When an endpoint fails or a peer is silent for `lost_seconds`, the transport fails for good:
// the sink is told, and every pending and later call throws PeerLost with that peer's rank. abort() does the same with
// Aborted.
//
// Order. Messages to one peer may arrive in any order, each once. Gets complete in any order.
//
// Threads. All members may be called from any thread but the progress thread; a sink must not call its transport.
//
// Memory. Queued messages to all peers together take at most `max_queued_bytes`; a send beyond that waits. Gets queued
// beyond those in flight take about 100 bytes each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/errors.h"
#include "comm/memory_kind.h"

namespace oomb::comm {

/// What a message is, for the sink's choice and for the counters. Kinds from kHeartbeat on are the transport's own.
enum class MessageKind : std::uint8_t {
  kMeans,         ///< means and page addresses of a (layer, chunk)
  kContribution,  ///< staged gradients are ready
  kMarker,        ///< counts of a contributing chunk
  kAck,           ///< staged gradients were fetched
  kUser,          ///< tests, benchmarks
  kHeartbeat,
  kSegment,  ///< remote keys come and go
  kGoodbye,
};
inline constexpr int kNumMessageKinds = 8;
const char* name_of(MessageKind kind);

/// A segment is a registered range of memory. Ids count from 1 on each worker and are never used again; id 0 is a
/// probe of kProbeBytes of host memory that every worker has from the start, for self-measurement.
using SegmentId = std::uint32_t;
inline constexpr SegmentId kProbeSegment = 0;
inline constexpr std::int64_t kProbeBytes = std::int64_t{1} << 20;

/// A place in the memory of a worker that is known from the context.
struct RemoteAddress {
  SegmentId segment = 0;
  std::int64_t offset = 0;  ///< bytes from the segment's start
  bool operator==(const RemoteAddress&) const = default;
};

/// One contiguous read of a peer's memory.
struct GetRequest {
  int peer = 0;  ///< not the own rank
  RemoteAddress from;
  void* to = nullptr;
  std::int64_t bytes = 0;  ///< 0 is allowed and moves nothing
  MemoryKind to_kind = MemoryKind::kHost;
};

/// A batch of gets under way. 0 is no ticket.
using Ticket = std::uint64_t;

/// Called on the progress thread (on_failure also on the thread that calls abort()). Neither may block or call the
/// transport.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  /// A CommError thrown here fails the transport with Aborted and its text.
  virtual void on_message(int peer, MessageKind kind, std::span<const std::byte> body) = 0;
  /// Once, when the transport fails.
  virtual void on_failure(const Failure& failure) = 0;
};

/// Application bytes and messages since the start; envelopes of the network below are not counted.
struct Traffic {
  struct Count {
    std::int64_t messages = 0;
    std::int64_t bytes = 0;
  };
  struct Peer {
    Count sent[kNumMessageKinds];
    Count received[kNumMessageKinds];
    Count got;  ///< gets from this peer, counted when complete
  };
  std::vector<Peer> peers;  ///< by rank; the own one stays zero
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "ucx", "twin", and what it runs over, in a few words for a log.
  virtual std::string description() const = 0;

  /// Whether segments and targets of gets may be of this kind. Host memory always may; where CUDA memory may not, the
  /// caller stages through host memory.
  virtual bool supports(MemoryKind kind) const = 0;

  /// Starts deliveries; what came earlier is kept (at most max_queued_bytes) and delivered first. `sink` must outlive
  /// the transport or be replaced by null, after which it is no longer called. On return from set_sink(nullptr) no call
  /// to the old sink is running.
  virtual void set_sink(MessageSink* sink) = 0;

  /// Makes memory readable by all peers. Returns after every peer has acknowledged the remote key, so an address sent
  /// afterwards is always good. W - 1 messages of about 100 bytes and as many answers. The memory stays the caller's.
  virtual SegmentId register_segment(void* memory, std::int64_t bytes, MemoryKind kind, Deadline deadline) = 0;
  /// Returns after every peer has dropped the key, with no get of it under way. The caller has made sure that no peer
  /// will ask for it again.
  virtual void unregister_segment(SegmentId segment, Deadline deadline) = 0;

  /// Queues a message for `peer` (not the own rank) and returns; `body` is copied. Waits only while the queue is full,
  /// at most lost_seconds. Bodies are at most kMaxBodyBytes.
  virtual void send(int peer, MessageKind kind, std::span<const std::byte> body) = 0;
  /// The same body to all W - 1 peers, copied once.
  virtual void send_to_all(MessageKind kind, std::span<const std::byte> body) = 0;
  static constexpr std::int64_t kMaxBodyBytes = std::int64_t{64} << 20;

  /// Starts gets and returns. Targets must stay valid until wait() or done() has said that the batch is complete; after
  /// a failure, until the transport is destroyed. An empty batch is complete at once.
  /// std::logic_error for bytes outside of the peer's segments.
  virtual Ticket get(std::span<const GetRequest> requests) = 0;
  /// Whether the batch is complete; throws like wait() when the transport has failed. Does not end the ticket.
  virtual bool done(Ticket ticket) = 0;
  /// Waits for the batch and ends the ticket. After DeadlinePassed the ticket is still open. `waiting_for` is put into
  /// errors ("12 pages of layer 3").
  virtual void wait(Ticket ticket, Deadline deadline, const std::string& waiting_for) = 0;

  /// Hints for the twin, which fails a test when a get reads bytes that are not readable, or that stopped being so
  /// while it was under way. Other backends ignore them. The range lies in one registered segment.
  virtual void mark_readable(const void* /*begin*/, std::int64_t /*bytes*/) {}
  virtual void mark_freed(const void* /*begin*/, std::int64_t /*bytes*/) {}

  /// Fails the transport with Aborted; wakes every wait. Peers are not told: they see silence or a closed endpoint.
  virtual void abort(const std::string& reason) = 0;
  /// Empty as long as the transport works.
  virtual const Failure* failure() const = 0;

  virtual Traffic traffic() const = 0;
};

}  // namespace oomb::comm
