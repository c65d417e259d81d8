#include "comm/exchange/ucx_transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "comm/exchange/ucx_transport_impl.h"

namespace oomb::comm {

// --- creation and end ------------------------------------------------------------------------------------------------

UcxTransport::UcxTransport(const UcxOptions& options, const AllGatherBytes& all_gather)
    : TransportBase(options.rank, options.size, {options.lost_seconds, options.max_queued_bytes}),
      options_(options),
      peers_(static_cast<std::size_t>(options.size)),
      probe_(static_cast<std::size_t>(kProbeBytes)) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kUcxMessageId;
  handler.cb = &UcxTransport::on_message;
  handler.arg = this;
  check_ucx(ucp_worker_set_am_recv_handler(worker_.get(), &handler), "UCX takes no handler of messages");
  own_segments_[kProbeSegment] = std::make_unique<UcxMemory>(worker_, probe_.data(), kProbeBytes, MemoryKind::kHost);

  WireWriter own(256);
  const std::string key = own_segments_[kProbeSegment]->packed_key();
  own.put(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(probe_.data())));
  own.put(static_cast<std::uint32_t>(key.size()));
  own.put_bytes(as_bytes_of(key));
  own.put_bytes(as_bytes_of(worker_.address()));
  const std::vector<std::string> all = all_gather(text_of(own.bytes()));
  if (static_cast<int>(all.size()) != size()) throw CommError("addresses of all workers were not gathered");

  for (int rank = 0; rank < size(); ++rank) {
    if (rank == this->rank()) continue;
    WireReader reader(as_bytes_of(all[static_cast<std::size_t>(rank)]));
    RemoteSegment probe;
    probe.begin = reader.get<std::uint64_t>();
    probe.bytes = kProbeBytes;
    const std::string remote_key = text_of(reader.get_bytes(reader.get<std::uint32_t>()));
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    peer.owner = this;
    peer.rank = rank;
    peer.endpoint = connect_ucx(worker_, text_of(reader.rest()), &UcxTransport::on_error, &peer);
    probe.key = unpack_key(peer.endpoint, remote_key.data(), rank);
    remote_[{rank, kProbeSegment}] = std::move(probe);
  }
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  event_fd_ = worker_.event_fd();
  if (wake_fd_ < 0) throw CommError(std::string("eventfd: ") + std::strerror(errno));
  thread_ = std::thread([this] { run(); });
  const Deadline deadline = in_seconds(options_.connect_seconds + 1);  // the progress thread names the peer before
  std::unique_lock lock(mutex_);
  while (num_connected_ < size() - 1 && failure() == nullptr) {
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) break;
  }
  const int missing = size() - 1 - num_connected_;
  lock.unlock();
  if (missing > 0) abort(std::to_string(missing) + " workers did not answer over UCX");
}

UcxTransport::~UcxTransport() {
  {
    const std::lock_guard lock(queue_mutex_);
    closing_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

// --- application threads ---------------------------------------------------------------------------------------------

void UcxTransport::wake() {
  bool asleep = false;
  {
    const std::lock_guard lock(queue_mutex_);
    asleep = std::exchange(sleeping_, false);
  }
  const std::uint64_t one = 1;
  if (asleep && ::write(wake_fd_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    throw std::logic_error(std::string("eventfd: ") + std::strerror(errno));
  }
}

void UcxTransport::enqueue(Outgoing message) {
  {
    const std::lock_guard lock(queue_mutex_);
    outgoing_.push_back(std::move(message));
  }
  wake();
}

void UcxTransport::send(int peer, MessageKind kind, std::span<const std::byte> body) {
  check_send(peer, body.size());
  const auto bytes = static_cast<std::int64_t>(body.size());
  reserve_queue(bytes);
  count_sent(peer, kind, bytes);
  enqueue({peer, kind, body_of(body), bytes});
}

void UcxTransport::send_to_all(MessageKind kind, std::span<const std::byte> body) {
  const Body copy = body_of(body);
  const auto bytes = static_cast<std::int64_t>(body.size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    check_send(peer, body.size());
    reserve_queue(bytes);
    count_sent(peer, kind, bytes);
    enqueue({peer, kind, copy, bytes});
  }
}

void UcxTransport::tell_all(MessageKind kind, const Body& body) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) enqueue({peer, kind, body, 0});
  }
}

Ticket UcxTransport::get(std::span<const GetRequest> requests) {
  check_gets(requests);
  {
    const std::lock_guard lock(segments_mutex_);
    for (const GetRequest& request : requests) {
      const auto found = remote_.find({request.peer, request.from.segment});
      if (found == remote_.end() || found->second.dropping ||
          request.from.offset + request.bytes > found->second.bytes) {
        throw std::logic_error("a get from worker " + std::to_string(request.peer) + " outside of its segments");
      }
    }
    for (const GetRequest& request : requests) ++remote_[{request.peer, request.from.segment}].gets_under_way;
  }
  const Ticket ticket = open_ticket(static_cast<std::int64_t>(requests.size()));
  {
    const std::lock_guard lock(queue_mutex_);
    for (const GetRequest& request : requests) gets_.push_back({this, request, ticket});
  }
  wake();
  return ticket;
}

Body UcxTransport::segment_word(SegmentWord word, SegmentId segment) const {
  WireWriter writer(8);
  writer.put(static_cast<std::uint8_t>(word));
  writer.put(segment);
  return body_of(writer.bytes());
}

void UcxTransport::wait_for_answers(std::map<SegmentId, int>& missing, SegmentId segment, Deadline deadline,
                                    const char* what) {
  const std::string waiting_for = std::string("all workers to ") + what + " segment " + std::to_string(segment);
  std::unique_lock lock(mutex_);
  while (missing[segment] > 0) {
    raise_if_failed(waiting_for);
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && missing[segment] > 0) {
      raise_if_failed(waiting_for);
      throw DeadlinePassed(waiting_for + " (" + std::to_string(missing[segment]) + " did not)");
    }
  }
  missing.erase(segment);
}

SegmentId UcxTransport::register_segment(void* memory, std::int64_t bytes, MemoryKind kind, Deadline deadline) {
  if (!supports(kind) || bytes <= 0) {
    throw std::logic_error("cannot register " + std::to_string(bytes) + " bytes of " + name_of(kind) + " memory");
  }
  raise_if_failed("a segment to be registered");
  auto registered = std::make_unique<UcxMemory>(worker_, memory, bytes, kind);
  const std::string key = registered->packed_key();
  SegmentId segment = 0;
  {
    const std::lock_guard lock(mutex_);
    segment = ++last_segment_;
    own_segments_[segment] = std::move(registered);
    keys_to_come_[segment] = size() - 1;
  }
  WireWriter writer(128);
  writer.put(static_cast<std::uint8_t>(SegmentWord::kAdd));
  writer.put(segment);
  writer.put(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory)));
  writer.put(bytes);
  writer.put_bytes(as_bytes_of(key));
  tell_all(MessageKind::kSegment, body_of(writer.bytes()));
  wait_for_answers(keys_to_come_, segment, deadline, "take the key of");
  return segment;
}

void UcxTransport::unregister_segment(SegmentId segment, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (segment == kProbeSegment || !own_segments_.contains(segment)) throw std::logic_error("no such segment");
    keys_to_go_[segment] = size() - 1;
  }
  tell_all(MessageKind::kSegment, segment_word(SegmentWord::kDrop, segment));
  wait_for_answers(keys_to_go_, segment, deadline, "drop the key of");
  const std::lock_guard lock(mutex_);
  own_segments_.erase(segment);
}

bool ucx_available() { return true; }

std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options, const AllGatherBytes& all_gather) {
  auto transport = std::make_unique<UcxTransport>(options, all_gather);
  if (transport->failure() != nullptr) transport->failure()->raise("the first message of every worker over UCX");
  return transport;
}

}  // namespace oomb::comm
