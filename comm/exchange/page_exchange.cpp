#include "comm/exchange/page_exchange.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/exchange/contribution_inbox.h"
#include "comm/exchange/contribution_outbox.h"
#include "comm/exchange/means_board.h"
#include "comm/exchange/wire.h"

namespace oomb::comm {

namespace {

// Start of every body but an ack's: whose message this is. 24 bytes.
void put_header(WireWriter& writer, const SequenceId& id, std::int64_t layer, std::int64_t chunk) {
  writer.put(id.step);
  writer.put(id.sequence);
  writer.put(static_cast<std::int32_t>(layer));
  writer.put(static_cast<std::int32_t>(chunk));
}

void put_address(WireWriter& writer, const RemoteAddress& address) {
  writer.put(address.segment);
  writer.put(address.offset);
}

RemoteAddress get_address(WireReader& reader) {
  RemoteAddress address;
  address.segment = reader.get<SegmentId>();
  address.offset = reader.get<std::int64_t>();
  return address;
}

SequenceId get_sequence(WireReader& reader) {
  SequenceId id;
  id.step = reader.get<std::int64_t>();
  id.sequence = reader.get<std::int64_t>();
  return id;
}

std::string describe_step(const SequenceId& id) {
  return "sequence " + std::to_string(id.sequence) + ", step " + std::to_string(id.step);
}

}  // namespace

struct PageExchange::Impl : MessageSink {
  Impl(Transport* network, const Options& given) : transport(network), options(given), slots(given.staging.num_slots) {}

  // What is known of the open sequence.
  struct Open {
    Open(const SequenceShape& cut, int rank, StagingSlots* staging)
        : shape(cut), board(cut), inbox(cut, rank), outbox(cut, rank, staging) {}
    SequenceShape shape;
    MeansBoard board;
    ContributionInbox inbox;
    ContributionOutbox outbox;
  };
  struct Early {
    SequenceId id;
    int peer;
    MessageKind kind;
    std::vector<std::byte> body;
  };

  void on_message(int peer, MessageKind kind, std::span<const std::byte> body) override {
    const std::lock_guard lock(mutex);
    WireReader reader(body);
    const SequenceId id = get_sequence(reader);
    if (open && id == open->shape.id) {
      dispatch(peer, kind, reader);
    } else if (last_id && id <= *last_id) {
      ++stale;
    } else {
      keep_early(id, peer, kind, body);
    }
    changed.notify_all();
  }

  void on_failure(const Failure& why) override {
    const std::lock_guard lock(mutex);
    failure = why;
    changed.notify_all();
  }

  void keep_early(const SequenceId& id, int peer, MessageKind kind, std::span<const std::byte> body) {
    early_bytes += static_cast<std::int64_t>(body.size());
    if (early_bytes > options.max_early_bytes) {
      throw ProtocolError("worker " + std::to_string(peer) + " is ahead at " + describe_step(id) + ": more than " +
                          std::to_string(options.max_early_bytes) + " bytes came for sequences not begun here");
    }
    early.push_back({id, peer, kind, {body.begin(), body.end()}});
  }

  // With the lock held, after the sequence was read.
  void dispatch(int peer, MessageKind kind, WireReader& reader) {
    switch (kind) {
      case MessageKind::kMeans:
        return read_means(peer, reader);
      case MessageKind::kContribution:
        return read_contribution(peer, reader);
      case MessageKind::kMarker:
        return read_marker(peer, reader);
      case MessageKind::kAck:
        count(open->outbox.acknowledged(peer, reader.get<std::uint64_t>()));
        return reader.expect_end();
      case MessageKind::kUser:
      case MessageKind::kHeartbeat:
      case MessageKind::kSegment:
      case MessageKind::kGoodbye:
        break;
    }
    throw ProtocolError(std::string("a message of kind ") + name_of(kind) + " is not part of the page exchange");
  }

  void read_means(int peer, WireReader& reader) {
    const auto layer = reader.get<std::int32_t>();
    const auto chunk = reader.get<std::int32_t>();
    if (chunk < 0 || chunk >= open->shape.num_chunks() || open->shape.owner_of(chunk) != peer) {
      throw ProtocolError("worker " + std::to_string(peer) + " publishes " + describe(open->shape.id, layer, chunk) +
                          ", which is not its own");
    }
    const auto num_pages = reader.get<std::uint32_t>();
    std::vector<RemoteAddress> pages;
    for (std::uint32_t i = 0; i < num_pages; ++i) pages.push_back(get_address(reader));
    count(open->board.put(layer, chunk, pages, reader.rest()));
  }

  void read_contribution(int peer, WireReader& reader) {
    Contribution note;
    note.peer = peer;
    note.layer = reader.get<std::int32_t>();
    note.target_chunk = reader.get<std::int32_t>();
    note.from_chunk = reader.get<std::int32_t>();
    const auto num_pages = reader.get<std::uint32_t>();
    note.note = reader.get<std::uint64_t>();
    for (std::uint32_t i = 0; i < num_pages; ++i) {
      const auto page = reader.get<std::int64_t>();
      note.pages.push_back({page, get_address(reader)});
    }
    reader.expect_end();
    count(open->inbox.add_note(note));
  }

  void read_marker(int peer, WireReader& reader) {
    const auto layer = reader.get<std::int32_t>();
    const auto from_chunk = reader.get<std::int32_t>();
    const auto num_counts = reader.get<std::uint32_t>();
    std::vector<MarkerCount> counts;
    for (std::uint32_t i = 0; i < num_counts; ++i) {
      const std::int64_t target = reader.get<std::int32_t>();
      counts.push_back({target, reader.get<std::uint32_t>()});
    }
    reader.expect_end();
    count(open->inbox.add_marker(peer, layer, from_chunk, counts));
  }

  void count(bool accepted) {
    if (!accepted) ++duplicates;
  }

  Open& sequence() {
    if (!open) throw std::logic_error("no sequence is open");
    return *open;
  }

  // Waits, with `lock` held on entry and exit, until `ready()`; `what()` says what is awaited.
  template <class Ready, class What>
  void wait_until(std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready, What what) {
    for (;;) {
      if (failure) failure->raise(what());
      if (ready()) return;
      if (changed.wait_until(lock, deadline) == std::cv_status::timeout && !failure && !ready()) {
        throw DeadlinePassed(what());
      }
    }
  }

  std::string from(std::int64_t chunk) { return " from worker " + std::to_string(sequence().shape.owner_of(chunk)); }

  // What keeps an own chunk from being complete.
  std::string missing(std::int64_t layer, std::int64_t chunk) {
    const std::int64_t source = open->inbox.first_missing(layer, chunk);
    return "what chunk " + std::to_string(source) + " contributes to " + describe(open->shape.id, layer, chunk) +
           (source < 0 ? "" : from(source));
  }

  Transport* const transport;
  const Options options;
  mutable std::mutex mutex;
  std::condition_variable changed;
  StagingSlots slots;
  std::unique_ptr<Open> open;
  std::optional<SequenceId> last_id;  // of the newest sequence that was begun
  std::optional<Failure> failure;
  std::deque<Early> early;
  std::int64_t early_bytes = 0;
  std::int64_t duplicates = 0, stale = 0;
};

PageExchange::PageExchange(Transport* transport, const Options& options)
    : impl_(std::make_unique<Impl>(transport, options)) {
  transport->set_sink(impl_.get());
}

PageExchange::~PageExchange() { impl_->transport->set_sink(nullptr); }

void PageExchange::begin_sequence(const SequenceShape& shape) {
  if (shape.num_workers != impl_->transport->size() || shape.first_owner < 0 || shape.num_pages <= 0 ||
      shape.pages_per_chunk <= 0 || shape.num_layers <= 0) {
    throw std::logic_error("a sequence of " + std::to_string(shape.num_pages) + " pages for " +
                           std::to_string(shape.num_workers) + " workers cannot begin");
  }
  const std::lock_guard lock(impl_->mutex);
  if (impl_->open) throw std::logic_error("a sequence is open already");
  if (impl_->last_id && shape.id <= *impl_->last_id) throw std::logic_error("sequences must ascend");
  impl_->last_id = shape.id;
  impl_->open = std::make_unique<Impl::Open>(shape, impl_->transport->rank(), &impl_->slots);
  std::deque<Impl::Early> later;
  for (Impl::Early& message : impl_->early) {
    if (message.id > shape.id) {
      later.push_back(std::move(message));
      continue;
    }
    impl_->early_bytes -= static_cast<std::int64_t>(message.body.size());
    if (message.id < shape.id) {
      ++impl_->stale;
      continue;
    }
    WireReader reader(message.body);
    get_sequence(reader);
    impl_->dispatch(message.peer, message.kind, reader);
  }
  impl_->early = std::move(later);
}

void PageExchange::end_sequence(Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  ContributionOutbox& outbox = impl_->sequence().outbox;
  impl_->wait_until(
      lock, deadline, [&] { return outbox.outstanding() == 0; },
      [&] {
        return "acknowledgements of " + std::to_string(outbox.outstanding()) + " contributions to " +
               describe_step(impl_->open->shape.id) + ", first from worker " + std::to_string(outbox.slowest_owner());
      });
  impl_->open.reset();
}

void PageExchange::publish(std::int64_t layer, std::int64_t chunk, std::span<const RemoteAddress> pages,
                           std::span<const std::byte> means) {
  SequenceShape shape;
  {
    const std::lock_guard lock(impl_->mutex);
    shape = impl_->sequence().shape;
  }
  if (chunk < 0 || chunk >= shape.num_chunks() || shape.owner_of(chunk) != impl_->transport->rank() ||
      static_cast<std::int64_t>(pages.size()) != shape.pages_of(chunk)) {
    throw std::logic_error("cannot publish " + std::to_string(pages.size()) + " pages as " +
                           describe(shape.id, layer, chunk));
  }
  WireWriter writer(28 + 12 * pages.size() + means.size());
  put_header(writer, shape.id, layer, chunk);
  writer.put(static_cast<std::uint32_t>(pages.size()));
  for (const RemoteAddress& page : pages) put_address(writer, page);
  writer.put_bytes(means);
  impl_->transport->send_to_all(MessageKind::kMeans, writer.bytes());
}

bool PageExchange::means_ready(std::int64_t layer, std::int64_t chunk) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sequence().board.has_means(layer, chunk);
}

std::vector<std::byte> PageExchange::take_means(std::int64_t layer, std::int64_t chunk, Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  MeansBoard& board = impl_->sequence().board;
  impl_->wait_until(
      lock, deadline, [&] { return board.published(layer, chunk); },
      [&] { return "the means of " + describe(impl_->open->shape.id, layer, chunk) + impl_->from(chunk); });
  return board.take(layer, chunk);
}

RemoteAddress PageExchange::address_of(std::int64_t layer, std::int64_t page) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sequence().board.address_of(layer, page);
}

Ticket PageExchange::get_pages(std::span<const PageFetch> pages) {
  std::vector<GetRequest> requests;
  requests.reserve(pages.size());
  {
    const std::lock_guard lock(impl_->mutex);
    const Impl::Open& open = impl_->sequence();
    for (const PageFetch& page : pages) {
      requests.push_back({open.shape.owner_of(open.shape.chunk_of(page.page)),
                          open.board.address_of(page.layer, page.page), page.to, impl_->options.page_bytes,
                          page.to_kind});
    }
  }
  return impl_->transport->get(requests);
}

void PageExchange::wait(Ticket ticket, Deadline deadline) {
  impl_->transport->wait(ticket, deadline, "pages or gradients of other workers");
}

std::vector<std::int64_t> PageExchange::acquire_staging(std::int64_t count, Deadline deadline) {
  if (count > impl_->slots.num_slots()) {
    throw std::logic_error(std::to_string(count) + " staging slots asked for, there are " +
                           std::to_string(impl_->slots.num_slots()));
  }
  std::unique_lock lock(impl_->mutex);
  ContributionOutbox& outbox = impl_->sequence().outbox;
  impl_->wait_until(
      lock, deadline, [&] { return impl_->slots.num_free() >= count; },
      [&] {
        return std::to_string(count) + " free staging slots (" + std::to_string(impl_->slots.num_free()) + " of " +
               std::to_string(impl_->slots.num_slots()) + " are free, worker " +
               std::to_string(outbox.slowest_owner()) + " has not acknowledged)";
      });
  return impl_->slots.take(count);
}

void PageExchange::announce(std::int64_t layer, std::int64_t target_chunk, std::int64_t from_chunk,
                            std::span<const Staged> pages) {
  const Staging& staging = impl_->options.staging;
  std::vector<std::int64_t> numbers, slots;
  for (const Staged& staged : pages) {
    numbers.push_back(staged.page);
    slots.push_back(staged.slot);
  }
  WireWriter writer(40 + 20 * pages.size());
  int owner = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    Impl::Open& open = impl_->sequence();
    const std::uint64_t note = open.outbox.announce(layer, target_chunk, from_chunk, numbers, std::move(slots));
    owner = open.shape.owner_of(target_chunk);
    put_header(writer, open.shape.id, layer, target_chunk);
    writer.put(static_cast<std::int32_t>(from_chunk));
    writer.put(static_cast<std::uint32_t>(pages.size()));
    writer.put(note);
  }
  for (const Staged& staged : pages) {
    writer.put(staged.page);
    put_address(writer, {staging.base.segment, staging.base.offset + staged.slot * staging.slot_bytes});
  }
  impl_->transport->send(owner, MessageKind::kContribution, writer.bytes());
}

void PageExchange::finish(std::int64_t layer, std::int64_t from_chunk) {
  std::vector<std::vector<MarkerCount>> markers;
  SequenceId id;
  {
    const std::lock_guard lock(impl_->mutex);
    Impl::Open& open = impl_->sequence();
    markers = open.outbox.finish(layer, from_chunk);
    id = open.shape.id;
  }
  for (int owner = 0; owner < impl_->transport->size(); ++owner) {
    if (owner == impl_->transport->rank()) continue;
    const auto& counts = markers[static_cast<std::size_t>(owner)];
    WireWriter writer(28 + 8 * counts.size());
    put_header(writer, id, layer, from_chunk);
    writer.put(static_cast<std::uint32_t>(counts.size()));
    for (const MarkerCount& count : counts) {
      writer.put(static_cast<std::int32_t>(count.target_chunk));
      writer.put(static_cast<std::uint32_t>(count.pages));
    }
    impl_->transport->send(owner, MessageKind::kMarker, writer.bytes());
  }
}

std::vector<Contribution> PageExchange::take_contributions(std::int64_t layer, std::int64_t from_chunk,
                                                           Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  ContributionInbox& inbox = impl_->sequence().inbox;
  impl_->wait_until(
      lock, deadline, [&] { return inbox.all_in(layer, from_chunk); },
      [&] {
        return "the contributions of " + describe(impl_->open->shape.id, layer, from_chunk) + impl_->from(from_chunk);
      });
  return inbox.take(layer, from_chunk);
}

std::optional<Contribution> PageExchange::next_contribution(std::int64_t layer, std::int64_t chunk, Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  ContributionInbox& inbox = impl_->sequence().inbox;
  impl_->wait_until(
      lock, deadline, [&] { return inbox.num_waiting() > 0 || inbox.complete(layer, chunk); },
      [&] { return impl_->missing(layer, chunk); });
  return inbox.take_oldest();
}

std::optional<Contribution> PageExchange::next_contribution() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->failure) impl_->failure->raise("contributions");
  return impl_->sequence().inbox.take_oldest();
}

Ticket PageExchange::get_staged(const Contribution& contribution, std::span<void* const> to, MemoryKind to_kind) {
  if (to.size() != contribution.pages.size()) throw std::logic_error("a target for each staged page is needed");
  std::vector<GetRequest> requests;
  requests.reserve(to.size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    requests.push_back(
        {contribution.peer, contribution.pages[i].address, to[i], impl_->options.staging.slot_bytes, to_kind});
  }
  return impl_->transport->get(requests);
}

void PageExchange::acknowledge(const Contribution& contribution) {
  WireWriter writer(24);
  {
    const std::lock_guard lock(impl_->mutex);
    Impl::Open& open = impl_->sequence();
    open.inbox.acknowledge(contribution);
    writer.put(open.shape.id.step);
    writer.put(open.shape.id.sequence);
    writer.put(contribution.note);
    impl_->changed.notify_all();  // another thread may be in wait_complete()
  }
  impl_->transport->send(contribution.peer, MessageKind::kAck, writer.bytes());
}

bool PageExchange::is_complete(std::int64_t layer, std::int64_t chunk) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sequence().inbox.complete(layer, chunk);
}

void PageExchange::wait_complete(std::int64_t layer, std::int64_t chunk, Deadline deadline) {
  std::unique_lock lock(impl_->mutex);
  ContributionInbox& inbox = impl_->sequence().inbox;
  impl_->wait_until(
      lock, deadline,
      [&] {
        if (inbox.only_acknowledgements_missing(layer, chunk)) {
          throw std::logic_error("contributions to " + describe(impl_->open->shape.id, layer, chunk) +
                                 " have arrived and were not acknowledged here");
        }
        return inbox.complete(layer, chunk);
      },
      [&] { return impl_->missing(layer, chunk); });
}

PageExchange::Counters PageExchange::counters() const {
  const std::lock_guard lock(impl_->mutex);
  std::int64_t held = impl_->early_bytes;
  if (impl_->open) held += impl_->open->board.held_bytes() + impl_->open->inbox.held_bytes();
  return {impl_->duplicates, impl_->stale, held};
}

}  // namespace oomb::comm
