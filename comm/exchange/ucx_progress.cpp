#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "comm/exchange/ucx_transport_impl.h"

namespace oomb::comm {

namespace {

// A broken connection is told a little later than it is seen: the peer's last words may name the worker that really
// died.
constexpr double kLastWordsSeconds = 0.2;
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr int kSleepMilliseconds = 50;
constexpr double kCloseSeconds = 1.0;
constexpr auto kClosingPause = std::chrono::microseconds(100);

}  // namespace

void UcxTransport::run() {
  try {
    connect_and_run();
  } catch (const std::exception& error) {
    abort(std::string("the progress thread failed: ") + error.what());
  }
  close();
}

void UcxTransport::connect_and_run() {
  const Deadline start = Clock::now();
  last_turn_ = start;
  for (Peer& peer : peers_) {
    // Until its first message a peer has connect_seconds, not lost_seconds.
    peer.last_heard = start;
    peer.last_sent = Deadline::min();
  }
  for (Deadline idle_since = start;;) {
    const bool worked = progress();
    const Deadline now = Clock::now();
    watch(now);
    if (failure() != nullptr) pass_on_failure();
    {
      const std::lock_guard lock(queue_mutex_);
      if (closing_ && outgoing_.empty()) return;
    }
    if (worked) {
      idle_since = now;
    } else if (now - idle_since > kSpin) {
      sleep();
    }
  }
}

bool UcxTransport::progress() {
  bool worked = submit();
  for (int i = 0; i < 64 && ucp_worker_progress(worker_.get()) != 0; ++i) worked = true;
  return worked;
}

bool UcxTransport::submit() {
  bool worked = false;
  for (;;) {
    Outgoing message;
    std::optional<Getting> get;
    {
      const std::lock_guard lock(queue_mutex_);
      if (!outgoing_.empty()) {
        message = std::move(outgoing_.front());
        outgoing_.pop_front();
      } else if (!gets_.empty() && gets_in_flight_ < options_.max_gets_in_flight) {
        get = gets_.front();
        gets_.pop_front();
      } else {
        return worked;
      }
    }
    worked = true;
    if (get) {
      start_get(*get);
    } else {
      start_send(std::move(message));
    }
  }
}

void UcxTransport::start_send(Outgoing message) {
  Peer& peer = peers_[static_cast<std::size_t>(message.peer)];
  if (peer.broken_since != Deadline::max()) {  // it will be told as lost
    release_queue(message.queued_bytes);
    return;
  }
  peer.last_sent = Clock::now();
  if (message.kind == MessageKind::kHeartbeat) peer.heartbeat_pending = true;
  if (message.kind >= MessageKind::kHeartbeat) {  // the application's were counted when it sent them
    count_sent(message.peer, message.kind, static_cast<std::int64_t>(message.body->size()));
  }
  auto* sending = new Sending{{std::move(message)}, this, {}};
  sending->envelope = {static_cast<std::uint32_t>(sending->kind), static_cast<std::int32_t>(rank())};
  ucp_request_param_t param{};
  // Eager: the receiver's callback gets all the bytes, and nothing has to be fetched.
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &UcxTransport::on_sent;
  param.user_data = sending;
  ++sends_in_flight_;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(peer.endpoint, kUcxMessageId, &sending->envelope, sizeof(UcxEnvelope), sending->body->data(),
                      sending->body->size(), &param);
  if (!UCS_PTR_IS_PTR(request)) on_sent(nullptr, UCS_PTR_STATUS(request), sending);
}

void UcxTransport::on_sent(void* request, ucs_status_t status, void* user_data) {
  const std::unique_ptr<Sending> sending(static_cast<Sending*>(user_data));
  UcxTransport* self = sending->owner;
  Peer& peer = self->peers_[static_cast<std::size_t>(sending->peer)];
  --self->sends_in_flight_;
  if (sending->kind == MessageKind::kHeartbeat) peer.heartbeat_pending = false;
  self->release_queue(sending->queued_bytes);
  if (status != UCS_OK) self->broken(peer, status);
  if (request != nullptr) ucp_request_free(request);
}

void UcxTransport::start_get(const Getting& get) {
  auto* getting = new Getting(get);
  ++gets_in_flight_;
  Peer& peer = peers_[static_cast<std::size_t>(get.request.peer)];
  if (peer.broken_since != Deadline::max() || shutting_) return finish_get(getting, UCS_ERR_CONNECTION_RESET);
  if (get.request.bytes == 0) return finish_get(getting, UCS_OK);
  ucp_rkey_h key = nullptr;
  std::uint64_t from = 0;
  {
    const std::lock_guard lock(segments_mutex_);
    const RemoteSegment& segment = remote_.at({get.request.peer, get.request.from.segment});
    key = segment.key.get();
    from = segment.begin + static_cast<std::uint64_t>(get.request.from.offset);
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &UcxTransport::on_got;
  param.user_data = getting;
  param.memory_type = ucx_memory_type(get.request.to_kind);
  const ucs_status_ptr_t request =
      ucp_get_nbx(peer.endpoint, get.request.to, static_cast<std::size_t>(get.request.bytes), from, key, &param);
  if (!UCS_PTR_IS_PTR(request)) finish_get(getting, UCS_PTR_STATUS(request));
}

void UcxTransport::on_got(void* request, ucs_status_t status, void* getting) {
  auto* get = static_cast<Getting*>(getting);
  get->owner->finish_get(get, status);
  ucp_request_free(request);
}

void UcxTransport::finish_get(Getting* get, ucs_status_t status) {
  const std::unique_ptr<Getting> getting(get);
  const int peer = getting->request.peer;
  --gets_in_flight_;
  {
    const std::lock_guard lock(segments_mutex_);
    const auto at = remote_.find({peer, getting->request.from.segment});
    --at->second.gets_under_way;
    drop_if_unused(at);
  }
  if (status == UCS_OK) {
    part_done(getting->ticket, peer, getting->request.bytes);
  } else {
    broken(peers_[static_cast<std::size_t>(peer)], status);
  }
}

// Under segments_mutex_.
void UcxTransport::drop_if_unused(std::map<RemoteId, RemoteSegment>::iterator at) {
  if (!at->second.dropping || at->second.gets_under_way > 0) return;
  const auto [peer, segment] = at->first;
  remote_.erase(at);
  const std::lock_guard lock(queue_mutex_);
  outgoing_.push_back({peer, MessageKind::kSegment, segment_word(SegmentWord::kDropped, segment), 0});
}

ucs_status_t UcxTransport::on_message(void* self, const void* header, std::size_t header_length, void* data,
                                      std::size_t length, const ucp_am_recv_param_t* param) {
  auto* transport = static_cast<UcxTransport*>(self);
  UcxEnvelope envelope;
  if (header_length != sizeof(envelope) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    transport->abort("a message with a strange envelope arrived");
    return UCS_OK;
  }
  std::memcpy(&envelope, header, sizeof(envelope));
  try {
    transport->received(envelope, {static_cast<const std::byte*>(data), length});
  } catch (const std::exception& error) {  // nothing may fly through UCX
    transport->abort(error.what());
  }
  return UCS_OK;
}

void UcxTransport::received(const UcxEnvelope& envelope, std::span<const std::byte> body) {
  const int sender = envelope.sender;
  if (sender < 0 || sender >= size() || sender == rank() || envelope.kind >= kNumMessageKinds) {
    throw ProtocolError("a message of kind " + std::to_string(envelope.kind) + " from " + std::to_string(sender));
  }
  Peer& peer = peers_[static_cast<std::size_t>(sender)];
  peer.last_heard = Clock::now();
  if (!peer.connected) {
    peer.connected = true;
    const std::string names = transports_of(peer.endpoint);
    const std::lock_guard lock(mutex_);
    if (++num_connected_ == 1) transports_ = names;
    changed_.notify_all();
  }
  const auto kind = static_cast<MessageKind>(envelope.kind);
  if (kind == MessageKind::kHeartbeat || kind == MessageKind::kSegment || kind == MessageKind::kGoodbye) {
    count_received(sender, kind, static_cast<std::int64_t>(body.size()));
    if (kind == MessageKind::kSegment) segment_message(sender, body);
    if (kind == MessageKind::kGoodbye) goodbye_message(sender, body);
  } else {
    deliver(sender, kind, body);
  }
}

void UcxTransport::segment_message(int peer, std::span<const std::byte> body) {
  WireReader reader(body);
  const auto word = static_cast<SegmentWord>(reader.get<std::uint8_t>());
  const auto segment = reader.get<SegmentId>();
  switch (word) {
    case SegmentWord::kAdd:
      return add_segment(peer, segment, reader);
    case SegmentWord::kDrop: {
      const std::lock_guard lock(segments_mutex_);
      const auto at = remote_.find({peer, segment});
      if (at == remote_.end()) throw ProtocolError("worker " + std::to_string(peer) + " drops an unknown segment");
      at->second.dropping = true;
      return drop_if_unused(at);
    }
    case SegmentWord::kAdded:
    case SegmentWord::kDropped: {
      const std::lock_guard lock(mutex_);
      auto& missing = word == SegmentWord::kAdded ? keys_to_come_ : keys_to_go_;
      if (const auto at = missing.find(segment); at != missing.end()) --at->second;
      return changed_.notify_all();
    }
  }
  throw ProtocolError("worker " + std::to_string(peer) + " says something unknown about a segment");
}

void UcxTransport::add_segment(int peer, SegmentId segment, WireReader& reader) {
  RemoteSegment remote;
  remote.begin = reader.get<std::uint64_t>();
  remote.bytes = reader.get<std::int64_t>();
  remote.key = unpack_key(peers_[static_cast<std::size_t>(peer)].endpoint, reader.rest().data(), peer);
  {
    const std::lock_guard lock(segments_mutex_);
    remote_[{peer, segment}] = std::move(remote);
  }
  const std::lock_guard lock(queue_mutex_);
  outgoing_.push_back({peer, MessageKind::kSegment, segment_word(SegmentWord::kAdded, segment), 0});
}

void UcxTransport::goodbye_message(int peer, std::span<const std::byte> body) {
  WireReader reader(body);
  if (static_cast<GoodbyeWord>(reader.get<std::uint8_t>()) == GoodbyeWord::kDone) {
    peers_[static_cast<std::size_t>(peer)].left = true;
    return;
  }
  const auto lost = reader.get<std::int32_t>();
  const std::string reason = text_of(reader.rest());
  const std::string teller = "told by worker " + std::to_string(peer);
  if (lost == rank()) {
    abort(teller + " that this worker was given up: " + reason);
  } else if (lost >= 0) {
    fail({Failure::Kind::kPeerLost, lost, reason + ", " + teller});
  } else {
    fail({Failure::Kind::kPeerLost, peer, "it aborted: " + reason});
  }
}

void UcxTransport::broken(Peer& peer, ucs_status_t status) {
  if (peer.broken_since != Deadline::max()) return;
  peer.broken_since = Clock::now();
  peer.how_broken = std::string("connection broken: ") + ucs_status_string(status);
}

// Tells who is lost: a connection broken for a while, or silence.
void UcxTransport::watch(Deadline now) {
  // Time in which this thread itself did not run proves nothing about the peers.
  const auto gap = now - last_turn_;
  last_turn_ = now;
  const double interval = options_.lost_seconds / 5;
  const bool was_away = gap > std::chrono::duration<double>(interval);
  for (Peer& peer : peers_) {
    if (peer.owner == nullptr) continue;
    if (was_away) peer.last_heard += gap;
    if (failure() != nullptr) continue;
    const double silent = std::chrono::duration<double>(now - peer.last_heard).count();
    const double allowed = peer.connected ? options_.lost_seconds : options_.connect_seconds;
    if (peer.broken_since != Deadline::max()) {
      if (now - peer.broken_since < std::chrono::duration<double>(kLastWordsSeconds)) continue;
      if (!(peer.left && shutting_)) fail({Failure::Kind::kPeerLost, peer.rank, peer.how_broken});
    } else if (silent > allowed && !peer.left) {
      fail({Failure::Kind::kPeerLost, peer.rank,
            peer.connected ? "no sign of life for " + std::to_string(silent) + " s"
                           : "no answer within " + std::to_string(silent) + " s over " + transports_of(peer.endpoint)});
    }
  }
  send_heartbeats(now);
}

void UcxTransport::send_heartbeats(Deadline now) {
  const auto interval = std::chrono::duration<double>(options_.lost_seconds / 5);
  for (Peer& peer : peers_) {
    if (peer.owner == nullptr || peer.heartbeat_pending) continue;
    if (peer.last_sent != Deadline::min() && now - peer.last_sent < interval) continue;
    start_send({peer.rank, MessageKind::kHeartbeat, body_of({}), 0});
  }
}

void UcxTransport::sleep() {
  {
    const std::lock_guard lock(queue_mutex_);
    if (!outgoing_.empty() || closing_ || (!gets_.empty() && gets_in_flight_ < options_.max_gets_in_flight)) return;
    sleeping_ = true;
  }
  if (ucp_worker_arm(worker_.get()) == UCS_OK) {
    const int heartbeat_ms = static_cast<int>(options_.lost_seconds / 20 * 1000);
    pollfd fds[2] = {{wake_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    ::poll(fds, 2, std::clamp(heartbeat_ms, 1, kSleepMilliseconds));
  }
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t ignored = ::read(wake_fd_, &count, sizeof(count));
  const std::lock_guard lock(queue_mutex_);
  sleeping_ = false;
}

// So that all name the same worker, whoever of them noticed it.
void UcxTransport::pass_on_failure() {
  if (std::exchange(failure_passed_on_, true)) return;
  WireWriter writer(128);
  writer.put(static_cast<std::uint8_t>(GoodbyeWord::kFailed));
  writer.put(static_cast<std::int32_t>(failure()->rank));
  writer.put_bytes(as_bytes_of(failure()->reason));
  for (const Peer& peer : peers_) {
    if (peer.owner != nullptr) start_send({peer.rank, MessageKind::kGoodbye, body_of(writer.bytes()), 0});
  }
}

bool UcxTransport::everyone_left() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.owner == nullptr || peer.left; });
}

template <class Done>
void UcxTransport::progress_until(Deadline deadline, Done done) {
  while (!done() && Clock::now() < deadline) {
    if (progress()) continue;
    watch(Clock::now());
    std::this_thread::sleep_for(kClosingPause);
  }
}

void UcxTransport::close() {
  shutting_ = true;
  if (failure() == nullptr) {
    WireWriter writer(1);
    writer.put(static_cast<std::uint8_t>(GoodbyeWord::kDone));
    for (const Peer& peer : peers_) {
      if (peer.owner != nullptr) start_send({peer.rank, MessageKind::kGoodbye, body_of(writer.bytes()), 0});
    }
    progress_until(in_seconds(options_.goodbye_seconds),
                   [&] { return failure() != nullptr || (everyone_left() && sends_in_flight_ == 0); });
  }
  const bool orderly = failure() == nullptr && everyone_left();
  if (failure() != nullptr) {
    pass_on_failure();
    progress_until(in_seconds(kLastWordsSeconds), [&] { return sends_in_flight_ == 0; });
  }
  std::vector<void*> closes;
  for (Peer& peer : peers_) {
    if (peer.owner == nullptr) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = orderly && peer.broken_since == Deadline::max() ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(peer.endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) closes.push_back(request);
    peer.broken_since = Clock::now();  // nothing more goes to it
  }
  progress_until(in_seconds(kCloseSeconds), [&] {
    return gets_in_flight_ == 0 && sends_in_flight_ == 0 &&
           std::all_of(closes.begin(), closes.end(),
                       [](void* request) { return ucp_request_check_status(request) != UCS_INPROGRESS; });
  });
  for (void* request : closes) ucp_request_free(request);
}

}  // namespace oomb::comm
