#include "comm/exchange/transport_base.h"

#include <stdexcept>

namespace oomb::comm {

const char* name_of(MessageKind kind) {
  switch (kind) {
    case MessageKind::kMeans:
      return "means";
    case MessageKind::kContribution:
      return "contribution";
    case MessageKind::kMarker:
      return "marker";
    case MessageKind::kAck:
      return "ack";
    case MessageKind::kUser:
      return "user";
    case MessageKind::kHeartbeat:
      return "heartbeat";
    case MessageKind::kSegment:
      return "segment";
    case MessageKind::kGoodbye:
      return "goodbye";
  }
  return "?";
}

TransportBase::TransportBase(int rank, int size, const Limits& limits) : rank_(rank), size_(size), limits_(limits) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw std::logic_error("rank " + std::to_string(rank) + " of " + std::to_string(size));
  }
  traffic_.peers.resize(static_cast<std::size_t>(size));
}

void TransportBase::check_send(int peer, std::size_t body_bytes) const {
  if (peer < 0 || peer >= size_ || peer == rank_) throw std::logic_error("no peer " + std::to_string(peer));
  if (static_cast<std::int64_t>(body_bytes) > kMaxBodyBytes) {
    throw std::logic_error("a message of " + std::to_string(body_bytes) + " bytes is too long");
  }
  raise_if_failed("a message to worker " + std::to_string(peer) + " to be sent");
}

void TransportBase::check_gets(std::span<const GetRequest> requests) const {
  for (const GetRequest& request : requests) {
    if (request.peer < 0 || request.peer >= size_ || request.peer == rank_ || request.bytes < 0 ||
        request.from.offset < 0 || (request.to == nullptr && request.bytes > 0) || !supports(request.to_kind)) {
      throw std::logic_error("a get of " + std::to_string(request.bytes) + " bytes of " + name_of(request.to_kind) +
                             " memory from worker " + std::to_string(request.peer) + " cannot be");
    }
  }
  raise_if_failed("gets to start");
}

void TransportBase::raise_if_failed(const std::string& waiting_for) const {
  if (const Failure* why = failure()) why->raise(waiting_for);
}

// Under sink_mutex_. `trouble` is set instead of failing here, where the sink could not be told.
void TransportBase::hand_over(int peer, MessageKind kind, std::span<const std::byte> body, std::string* trouble) {
  try {
    sink_->on_message(peer, kind, body);
  } catch (const CommError& error) {
    *trouble = error.what();
  }
}

void TransportBase::set_sink(MessageSink* sink) {
  std::string trouble;
  {
    const std::lock_guard lock(sink_mutex_);
    if (sink != nullptr && sink_ != nullptr) throw std::logic_error("the transport has a sink already");
    sink_ = sink;
    sink_knows_failure_ = false;
    if (sink == nullptr) return;
    while (!kept_.empty() && trouble.empty()) {
      const KeptMessage message = std::move(kept_.front());
      kept_.pop_front();
      kept_bytes_ -= static_cast<std::int64_t>(message.body.size());
      hand_over(message.peer, message.kind, message.body, &trouble);
    }
    if (const Failure* why = failure(); why != nullptr && !sink_knows_failure_) {
      sink_knows_failure_ = true;
      sink_->on_failure(*why);
    }
  }
  if (!trouble.empty()) abort(trouble);
}

void TransportBase::deliver(int peer, MessageKind kind, std::span<const std::byte> body) {
  if (failure() != nullptr) return;
  count_received(peer, kind, static_cast<std::int64_t>(body.size()));
  std::string trouble;
  {
    const std::lock_guard lock(sink_mutex_);
    if (sink_ != nullptr) {
      hand_over(peer, kind, body, &trouble);
    } else if (kept_bytes_ + static_cast<std::int64_t>(body.size()) > limits_.max_queued_bytes) {
      trouble = "more than " + std::to_string(limits_.max_queued_bytes) + " bytes arrived before anyone took them";
    } else {
      kept_bytes_ += static_cast<std::int64_t>(body.size());
      kept_.push_back({peer, kind, {body.begin(), body.end()}});
    }
  }
  if (!trouble.empty()) abort(trouble);
}

void TransportBase::abort(const std::string& reason) { fail({Failure::Kind::kAborted, -1, reason}); }

void TransportBase::fail(const Failure& why) {
  {
    const std::lock_guard lock(mutex_);
    if (first_failure_) return;
    first_failure_ = std::make_unique<Failure>(why);
    failure_.store(first_failure_.get(), std::memory_order_release);
    changed_.notify_all();
  }
  const std::lock_guard lock(sink_mutex_);
  if (sink_ != nullptr && !sink_knows_failure_) {
    sink_knows_failure_ = true;
    sink_->on_failure(why);
  }
}

Ticket TransportBase::open_ticket(std::int64_t parts) {
  const std::lock_guard lock(mutex_);
  open_parts_[++last_ticket_] = parts;
  return last_ticket_;
}

void TransportBase::part_done(Ticket ticket, int peer, std::int64_t bytes) {
  {
    const std::lock_guard lock(counter_mutex_);
    Traffic::Count& got = traffic_.peers[static_cast<std::size_t>(peer)].got;
    ++got.messages;
    got.bytes += bytes;
  }
  const std::lock_guard lock(mutex_);
  if (--open_parts_.at(ticket) == 0) changed_.notify_all();
}

bool TransportBase::done(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  raise_if_failed("gets");
  const auto found = open_parts_.find(ticket);
  if (found == open_parts_.end()) throw std::logic_error("no ticket " + std::to_string(ticket));
  return found->second == 0;
}

void TransportBase::wait(Ticket ticket, Deadline deadline, const std::string& waiting_for) {
  std::unique_lock lock(mutex_);
  const auto found = open_parts_.find(ticket);
  if (found == open_parts_.end()) throw std::logic_error("no ticket " + std::to_string(ticket));
  const std::int64_t& parts = found->second;  // references into the map outlive rehashing
  while (parts > 0) {
    raise_if_failed(waiting_for);
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && parts > 0) {
      raise_if_failed(waiting_for);
      throw DeadlinePassed(std::to_string(parts) + " of the gets for " + waiting_for);
    }
  }
  raise_if_failed(waiting_for);
  open_parts_.erase(ticket);
}

void TransportBase::reserve_queue(std::int64_t bytes) {
  const Deadline deadline = in_seconds(limits_.lost_seconds);
  std::unique_lock lock(mutex_);
  while (queued_bytes_ > 0 && queued_bytes_ + bytes > limits_.max_queued_bytes) {
    raise_if_failed("room in the send queue");
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      raise_if_failed("room in the send queue");
      throw DeadlinePassed("room in the send queue (" + std::to_string(queued_bytes_) + " bytes are queued)");
    }
  }
  queued_bytes_ += bytes;
}

void TransportBase::release_queue(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const bool was_full = queued_bytes_ > limits_.max_queued_bytes / 2;
  queued_bytes_ -= bytes;
  if (was_full) changed_.notify_all();
}

void TransportBase::count_sent(int peer, MessageKind kind, std::int64_t bytes) {
  const std::lock_guard lock(counter_mutex_);
  Traffic::Count& count = traffic_.peers[static_cast<std::size_t>(peer)].sent[static_cast<std::size_t>(kind)];
  ++count.messages;
  count.bytes += bytes;
}

void TransportBase::count_received(int peer, MessageKind kind, std::int64_t bytes) {
  const std::lock_guard lock(counter_mutex_);
  Traffic::Count& count = traffic_.peers[static_cast<std::size_t>(peer)].received[static_cast<std::size_t>(kind)];
  ++count.messages;
  count.bytes += bytes;
}

Traffic TransportBase::traffic() const {
  const std::lock_guard lock(counter_mutex_);
  return traffic_;
}

}  // namespace oomb::comm
