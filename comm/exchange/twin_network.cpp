#include "comm/exchange/twin_network.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <queue>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "comm/exchange/transport_base.h"

namespace oomb::comm {

namespace {

constexpr int kFreedByte = 0xFB;

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

using Body = std::shared_ptr<const std::vector<std::byte>>;

// A delivery under way: a message from `source` to `target`, or a get by `target` from `source`.
struct Event {
  Clock::time_point due;
  std::uint64_t order = 0;  // of scheduling, among equal times
  int source = 0;
  int target = 0;
  enum class What { kMessage, kGet, kDeclareLost } what = What::kMessage;
  MessageKind kind = MessageKind::kUser;
  Body body;
  std::int64_t queued_bytes = 0;  // what the sender's queue gets back
  GetRequest get;
  std::uint64_t generation = 0;
  Ticket ticket = 0;
};

struct Later {
  bool operator()(const Event& a, const Event& b) const { return a.due != b.due ? a.due > b.due : a.order > b.order; }
};

// Which bytes of a worker may be read, with a number that changes whenever they become readable again.
class ReadableRanges {
 public:
  void add(const std::byte* begin, std::int64_t bytes) {
    remove(begin, bytes);
    ranges_[begin] = {begin + bytes, ++last_generation_};
  }
  void remove(const std::byte* begin, std::int64_t bytes) {
    const std::byte* end = begin + bytes;
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin()) --at;
    while (at != ranges_.end() && at->first < end) {
      const std::byte* first = at->first;
      const Range range = at->second;
      if (range.end <= begin) {
        ++at;
        continue;
      }
      at = ranges_.erase(at);
      if (first < begin) ranges_[first] = {begin, range.generation};
      if (range.end > end) at = ranges_.insert_or_assign(end, Range{range.end, range.generation}).first;
    }
  }
  // 0 when the bytes are not one readable range.
  std::uint64_t generation_of(const std::byte* begin, std::int64_t bytes) const {
    auto at = ranges_.upper_bound(begin);
    if (at == ranges_.begin()) return 0;
    --at;
    return begin + bytes <= at->second.end ? at->second.generation : 0;
  }

 private:
  struct Range {
    const std::byte* end = nullptr;
    std::uint64_t generation = 0;
  };
  std::map<const std::byte*, Range> ranges_;
  std::uint64_t last_generation_ = 0;
};

}  // namespace

struct TwinNetwork::Impl {
  explicit Impl(const TwinOptions& given) : options(given) {}

  void run();
  void carry_out(std::unique_lock<std::mutex>& lock, Event& event);
  void carry_out_get(const Event& event);
  void schedule(Event event);
  std::uint64_t draw(int source, int target);
  bool gone(int rank) const { return lost[static_cast<std::size_t>(rank)]; }
  void lose(std::unique_lock<std::mutex>& lock, int rank);

  const TwinOptions options;
  std::mutex mutex;
  std::condition_variable changed;
  std::priority_queue<Event, std::vector<Event>, Later> events;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<bool> lost;
  std::vector<std::int64_t> deliveries_left;                   // until lose(); -1: never
  std::map<std::pair<int, int>, std::uint64_t> num_scheduled;  // by (source, target)
  std::vector<std::string> violations;
  std::uint64_t last_order = 0;
  std::int64_t num_deliveries = 0;
  bool closing = false;
  std::thread thread;
};

class TwinNetwork::Worker : public TransportBase {
 public:
  Worker(Impl* network, int rank)
      : TransportBase(rank, network->options.num_workers,
                      {network->options.lost_seconds, network->options.max_queued_bytes}),
        network_(network),
        probe_(static_cast<std::size_t>(kProbeBytes)) {
    segments_[kProbeSegment] = {probe_.data(), kProbeBytes, 0};
    readable_.add(probe_.data(), kProbeBytes);
  }

  std::string description() const override { return "twin of threads"; }
  bool supports(MemoryKind kind) const override { return kind == MemoryKind::kHost; }

  SegmentId register_segment(void* memory, std::int64_t bytes, MemoryKind kind, Deadline) override {
    if (!supports(kind) || bytes <= 0) throw std::logic_error("the twin registers host memory only");
    raise_if_failed("a segment to be registered");
    const std::lock_guard lock(network_->mutex);
    segments_[++last_segment_] = {static_cast<std::byte*>(memory), bytes, 0};
    if (!network_->options.check_reads) readable_.add(static_cast<std::byte*>(memory), bytes);
    return last_segment_;
  }

  void unregister_segment(SegmentId segment, Deadline deadline) override {
    std::unique_lock lock(network_->mutex);
    Segment& entry = segments_.at(segment);
    while (entry.gets_under_way > 0) {
      raise_if_failed("gets from a segment that goes");
      if (network_->changed.wait_until(lock, deadline) == std::cv_status::timeout && entry.gets_under_way > 0) {
        throw DeadlinePassed("gets from a segment that goes");
      }
    }
    readable_.remove(entry.memory, entry.bytes);
    segments_.erase(segment);
  }

  void send(int peer, MessageKind kind, std::span<const std::byte> body) override {
    check_send(peer, body.size());
    post(peer, kind, std::make_shared<const std::vector<std::byte>>(body.begin(), body.end()));
  }

  void send_to_all(MessageKind kind, std::span<const std::byte> body) override {
    const auto copy = std::make_shared<const std::vector<std::byte>>(body.begin(), body.end());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      check_send(peer, body.size());
      post(peer, kind, copy);
    }
  }

  Ticket get(std::span<const GetRequest> requests) override {
    check_gets(requests);
    const std::lock_guard lock(network_->mutex);
    for (const GetRequest& request : requests) {
      if (network_->workers[static_cast<std::size_t>(request.peer)]->locate(request) == nullptr) {
        throw std::logic_error("a get from worker " + std::to_string(request.peer) + " outside of its segments");
      }
    }
    const Ticket ticket = open_ticket(static_cast<std::int64_t>(requests.size()));
    for (const GetRequest& request : requests) {
      Worker& owner = *network_->workers[static_cast<std::size_t>(request.peer)];
      Event event;
      event.what = Event::What::kGet;
      event.source = request.peer;
      event.target = rank();
      event.get = request;
      event.ticket = ticket;
      const std::byte* from = owner.locate(request);
      ++owner.segments_.at(request.from.segment).gets_under_way;
      event.generation = owner.readable_.generation_of(from, request.bytes);
      if (event.generation == 0 && request.bytes > 0) complain(request, "starts while the bytes are not readable");
      network_->schedule(std::move(event));
    }
    return ticket;
  }

  void mark_readable(const void* begin, std::int64_t bytes) override {
    const std::lock_guard lock(network_->mutex);
    readable_.add(static_cast<const std::byte*>(begin), bytes);
  }

  void mark_freed(const void* begin, std::int64_t bytes) override {
    const std::lock_guard lock(network_->mutex);
    readable_.remove(static_cast<const std::byte*>(begin), bytes);
    std::memset(const_cast<void*>(begin), kFreedByte, static_cast<std::size_t>(bytes));
  }

  // The rest is called by the network; the first two under its mutex.
  const std::byte* locate(const GetRequest& request) const {
    const auto found = segments_.find(request.from.segment);
    if (found == segments_.end() || request.from.offset + request.bytes > found->second.bytes) return nullptr;
    return found->second.memory + request.from.offset;
  }
  void complain(const GetRequest& request, const std::string& what) {
    network_->violations.push_back("a get of " + std::to_string(request.bytes) + " bytes by worker " +
                                   std::to_string(rank()) + " from worker " + std::to_string(request.peer) +
                                   ", segment " + std::to_string(request.from.segment) + " at " +
                                   std::to_string(request.from.offset) + ", " + what);
  }
  using TransportBase::deliver;
  using TransportBase::fail;
  using TransportBase::part_done;
  using TransportBase::release_queue;

 private:
  friend struct Impl;
  struct Segment {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    std::int64_t gets_under_way = 0;
  };

  void post(int peer, MessageKind kind, const Body& body) {
    const auto bytes = static_cast<std::int64_t>(body->size());
    reserve_queue(bytes);
    count_sent(peer, kind, bytes);
    const std::lock_guard lock(network_->mutex);
    Event event;
    event.source = rank();
    event.target = peer;
    event.kind = kind;
    event.body = body;
    if (static_cast<int>(network_->draw(rank(), peer) % 1000) < network_->options.duplicate_per_mille) {
      network_->schedule(event);
    }
    event.queued_bytes = bytes;
    network_->schedule(std::move(event));
  }

  Impl* network_;
  std::vector<std::byte> probe_;
  std::unordered_map<SegmentId, Segment> segments_;  // this and what follows: under the network's mutex
  SegmentId last_segment_ = kProbeSegment;
  ReadableRanges readable_;
};

std::uint64_t TwinNetwork::Impl::draw(int source, int target) {
  const std::uint64_t number = ++num_scheduled[{source, target}];
  const auto pair = static_cast<std::uint64_t>(source * options.num_workers + target);
  return mix(options.seed ^ mix(pair ^ mix(number)));
}

// Under the mutex.
void TwinNetwork::Impl::schedule(Event event) {
  std::int64_t delay_us = 0;
  if (options.max_delay_us > 0) {
    delay_us = static_cast<std::int64_t>(draw(event.source, event.target) %
                                         static_cast<std::uint64_t>(options.max_delay_us + 1));
    if (event.source == options.slow_rank || event.target == options.slow_rank) delay_us *= options.slow_factor;
  }
  event.due = Clock::now() + std::chrono::microseconds(delay_us);
  event.order = ++last_order;
  const bool first = events.empty() || event.due < events.top().due;
  events.push(std::move(event));
  if (first) changed.notify_all();
}

void TwinNetwork::Impl::run() {
  std::unique_lock lock(mutex);
  while (!closing) {
    if (events.empty()) {
      changed.wait(lock);
    } else if (const auto due = events.top().due; due > Clock::now()) {
      changed.wait_until(lock, due);
    } else {
      Event event = events.top();
      events.pop();
      carry_out(lock, event);
    }
  }
}

void TwinNetwork::Impl::carry_out(std::unique_lock<std::mutex>& lock, Event& event) {
  Worker& target = *workers[static_cast<std::size_t>(event.target)];
  if (event.what == Event::What::kDeclareLost) {
    lock.unlock();
    target.fail(
        {Failure::Kind::kPeerLost, event.source, "no sign of life for " + std::to_string(options.lost_seconds) + " s"});
    lock.lock();
    return;
  }
  for (const int rank : {event.source, event.target}) {
    std::int64_t& left = deliveries_left[static_cast<std::size_t>(rank)];
    if (left >= 0 && --left < 0) lose(lock, rank);
  }
  if (gone(event.source) || gone(event.target)) return;
  ++num_deliveries;
  if (event.what == Event::What::kGet) {
    carry_out_get(event);
    lock.unlock();
    target.part_done(event.ticket, event.source, event.get.bytes);
  } else {
    lock.unlock();
    target.deliver(event.source, event.kind, *event.body);
    workers[static_cast<std::size_t>(event.source)]->release_queue(event.queued_bytes);
  }
  lock.lock();
}

// Under the mutex, so that nobody frees the bytes meanwhile.
void TwinNetwork::Impl::carry_out_get(const Event& event) {
  Worker& owner = *workers[static_cast<std::size_t>(event.source)];
  Worker& reader = *workers[static_cast<std::size_t>(event.target)];
  const std::byte* from = owner.locate(event.get);
  if (event.get.bytes > 0 && event.generation != 0 &&
      owner.readable_.generation_of(from, event.get.bytes) != event.generation) {
    reader.complain(event.get, "was under way when the bytes were freed");
  }
  if (event.get.bytes > 0) std::memcpy(event.get.to, from, static_cast<std::size_t>(event.get.bytes));
  if (--owner.segments_.at(event.get.from.segment).gets_under_way == 0) changed.notify_all();
}

// Under the mutex, which is given up while the worker itself is told.
void TwinNetwork::Impl::lose(std::unique_lock<std::mutex>& lock, int rank) {
  if (gone(rank)) return;
  lost[static_cast<std::size_t>(rank)] = true;
  const auto due =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.lost_seconds));
  for (int other = 0; other < options.num_workers; ++other) {
    if (other == rank) continue;
    Event event;
    event.what = Event::What::kDeclareLost;
    event.source = rank;
    event.target = other;
    event.due = due;
    event.order = ++last_order;
    events.push(std::move(event));
  }
  changed.notify_all();
  lock.unlock();
  workers[static_cast<std::size_t>(rank)]->abort("this worker was lost on purpose");
  lock.lock();
}

TwinNetwork::TwinNetwork(const TwinOptions& options) : impl_(std::make_unique<Impl>(options)) {
  const auto count = static_cast<std::size_t>(options.num_workers);
  impl_->lost.assign(count, false);
  impl_->deliveries_left.assign(count, -1);
  for (int rank = 0; rank < options.num_workers; ++rank) {
    impl_->workers.push_back(std::make_unique<Worker>(impl_.get(), rank));
  }
  impl_->thread = std::thread([this] { impl_->run(); });
}

TwinNetwork::~TwinNetwork() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
    impl_->changed.notify_all();
  }
  impl_->thread.join();
}

Transport& TwinNetwork::transport(int rank) { return *impl_->workers.at(static_cast<std::size_t>(rank)); }

void TwinNetwork::lose(int rank) {
  std::unique_lock lock(impl_->mutex);
  impl_->lose(lock, rank);
}

void TwinNetwork::lose_after(int rank, std::int64_t deliveries) {
  const std::lock_guard lock(impl_->mutex);
  impl_->deliveries_left.at(static_cast<std::size_t>(rank)) = deliveries;
}

std::vector<std::string> TwinNetwork::violations() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->violations;
}

std::int64_t TwinNetwork::deliveries() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->num_deliveries;
}

}  // namespace oomb::comm
