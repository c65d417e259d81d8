// What every backend of the transport needs: tickets, the final failure, the sink, counters, and the queue's bound.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/exchange/transport.h"

namespace oomb::comm {

/// Backends call the protected members, from any thread; nothing of theirs may be locked meanwhile that a sink, or a
/// caller that waits here, could want.
class TransportBase : public Transport {
 public:
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void set_sink(MessageSink* sink) override;
  bool done(Ticket ticket) override;
  void wait(Ticket ticket, Deadline deadline, const std::string& waiting_for) override;
  void abort(const std::string& reason) override;
  const Failure* failure() const override { return failure_.load(std::memory_order_acquire); }
  Traffic traffic() const override;

 protected:
  struct Limits {
    double lost_seconds = 0;
    std::int64_t max_queued_bytes = 0;
  };
  TransportBase(int rank, int size, const Limits& limits);
  ~TransportBase() override = default;

  /// std::logic_error unless `peer` is another rank and the body is short enough; raises the failure if there is one.
  void check_send(int peer, std::size_t body_bytes) const;
  void check_gets(std::span<const GetRequest> requests) const;
  void raise_if_failed(const std::string& waiting_for) const;

  /// Hands a message to the sink, or keeps it until there is one. Counts it.
  void deliver(int peer, MessageKind kind, std::span<const std::byte> body);
  /// Keeps the first failure, wakes all waits, tells the sink. Later ones are ignored.
  void fail(const Failure& failure);

  Ticket open_ticket(std::int64_t parts);
  /// One part of the batch has completed.
  void part_done(Ticket ticket, int peer, std::int64_t bytes);

  void count_sent(int peer, MessageKind kind, std::int64_t bytes);
  void count_received(int peer, MessageKind kind, std::int64_t bytes);

  /// Waits for room in the send queue; at least one message always fits.
  void reserve_queue(std::int64_t bytes);
  void release_queue(std::int64_t bytes);

  /// Guards `changed_` and what backends put beside it.
  std::mutex mutex_;
  std::condition_variable changed_;

 private:
  struct KeptMessage {
    int peer;
    MessageKind kind;
    std::vector<std::byte> body;
  };
  void hand_over(int peer, MessageKind kind, std::span<const std::byte> body, std::string* trouble);

  const int rank_, size_;
  const Limits limits_;
  std::atomic<const Failure*> failure_{nullptr};
  std::unique_ptr<Failure> first_failure_;
  std::unordered_map<Ticket, std::int64_t> open_parts_;
  Ticket last_ticket_ = 0;
  std::int64_t queued_bytes_ = 0;
  Traffic traffic_;  // under counter_mutex_
  mutable std::mutex counter_mutex_;

  std::mutex sink_mutex_;  // held while the sink is called
  MessageSink* sink_ = nullptr;
  bool sink_knows_failure_ = false;
  std::deque<KeptMessage> kept_;
  std::int64_t kept_bytes_ = 0;
};

}  // namespace oomb::comm
