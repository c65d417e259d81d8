#include "worker/cluster/exchanged_pages.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "worker/attention/page_gradients.h"

namespace oomb::cluster {

namespace {

constexpr int64_t kSlotAlignment = 256;
constexpr int64_t kLandingSlots = 256;  // batches of this size keep a link busy

int64_t aligned(int64_t bytes) { return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment; }

// Adds the time of its own life to a sum.
class WaitTimer {
 public:
  explicit WaitTimer(double* seconds) : seconds_(seconds) {}
  ~WaitTimer() { *seconds_ += std::chrono::duration<double>(comm::Clock::now() - start_).count(); }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  double* seconds_;
  comm::Clock::time_point start_ = comm::Clock::now();
};

}  // namespace

int64_t most_remote_pages(const ChunkGrid& grid, const attention::SelectionRule& rule, int num_workers) {
  // Of the last chunk's past, every num_workers-th chunk counted back from it is its owner's own.
  const int64_t last = grid.num_chunks() - 1;
  const int64_t remote = (last - last / num_workers) * (grid.chunk_tokens / grid.page_tokens);
  if (rule.dense) return remote;
  const int64_t tiles = (std::min(grid.chunk_tokens, grid.num_tokens) + rule.query_tile - 1) / rule.query_tile;
  const int64_t chosen =
      rule.chunk_pages > 0 ? std::max(rule.chunk_pages, rule.budget_pages) : tiles * rule.budget_pages;
  return std::min(remote, chosen);
}

TransferSlots plan_transfer_slots(const ChunkGrid& grid, const attention::SelectionRule& rule, int num_workers,
                                  const pages::PageLayout& layout, int64_t cache_bytes) {
  const int64_t most = most_remote_pages(grid, rule, num_workers);
  TransferSlots slots;
  if (most == 0) return slots;
  slots.staging = 2 * most;
  slots.landing = std::min(most, kLandingSlots);
  // Two slots let one block of pages arrive while another is read.
  slots.cache = std::max<int64_t>(std::min(most * layout.num_layers, cache_bytes / aligned(layout.kv_slot_bytes)), 2);
  return slots;
}

int64_t transfer_bytes(const TransferSlots& slots, const pages::PageLayout& layout) {
  return (slots.staging + slots.landing) * aligned(layout.gradient_slot_bytes) +
         slots.cache * aligned(layout.kv_slot_bytes);
}

ExchangedPages::ExchangedPages(comm::Transport* transport, const SegmentRegistry* homes, void* transfer,
                               comm::MemoryKind kind, const Options& options)
    : transport_(transport), homes_(homes), options_(options), kind_(kind), ledger_(options.layout.num_layers) {
  const int64_t gradient_bytes = aligned(options.layout.gradient_slot_bytes);
  const TransferSlots& slots = options.slots;
  char* const staging = static_cast<char*>(transfer);
  landing_ = staging + slots.staging * gradient_bytes;

  comm::PageExchange::Options exchange;
  exchange.page_bytes = options.layout.kv_slot_bytes;
  if (slots.staging > 0) {
    exchange.staging.base = {transport->register_segment(staging, slots.staging * gradient_bytes, kind, deadline()), 0};
    exchange.staging.slot_bytes = gradient_bytes;
    exchange.staging.num_slots = slots.staging;
  }
  exchange_ = std::make_unique<comm::PageExchange>(transport, exchange);
  staging_ = std::make_unique<ContributionStaging>(exchange_.get(), transport, staging, gradient_bytes,
                                                   std::max<int64_t>(slots.landing, 1));
  PageCache::Options cache;
  cache.num_slots = slots.cache;
  cache.slot_bytes = aligned(options.layout.kv_slot_bytes);
  cache.num_layers = options.layout.num_layers;
  cache.min_share = slots.staging / 2;
  cache.memory = landing_ + slots.landing * gradient_bytes;
  cache.kind = kind;
  if (options.types.device.is_cuda()) cache.before_reuse = [device = options.types.device] { synchronise(device); };
  cache_ = std::make_unique<PageCache>(exchange_.get(), cache);
}

void ExchangedPages::begin_step(int64_t step) {
  if (step > next_id_.step) next_id_ = {step, 0};
}

void ExchangedPages::begin_sequence(const SequencePages& pages, Work work) {
  pages_ = pages;
  pass_ = work == Work::training ? ExchangePass::pass1 : ExchangePass::evaluation;
  shape_.id = next_id_;
  shape_.num_layers = options_.layout.num_layers;
  shape_.num_pages = pages.grid.num_pages();
  shape_.pages_per_chunk = pages.grid.chunk_tokens / pages.grid.page_tokens;
  shape_.num_workers = num_workers();
  shape_.first_owner = static_cast<int>((next_id_.step + next_id_.sequence) % num_workers());
  ++next_id_.sequence;
  means_until_.assign(static_cast<size_t>(shape_.num_layers), 0);
  exchange_->begin_sequence(shape_);
}

void ExchangedPages::end_sequence() {
  cache_->clear(deadline());
  exchange_->end_sequence(deadline());
  pages_ = {};
}

void ExchangedPages::publish(int64_t layer, int64_t chunk) {
  const int64_t first = pages_.grid.first_page_of(chunk), count = pages_.grid.pages_of(chunk);
  const at::Tensor means = pages_.means[static_cast<size_t>(layer)].narrow(0, first, count).to(at::kCPU).contiguous();
  synchronise(options_.types.device);  // the homes are written
  std::vector<comm::RemoteAddress> addresses;
  for (int64_t page = first; page < first + count; ++page) {
    const void* home = pages_.table->home(layer, page);
    transport_->mark_readable(home, options_.layout.kv_slot_bytes);
    addresses.push_back(homes_->locate(home));
  }
  exchange_->publish(layer, chunk, addresses,
                     {static_cast<const std::byte*>(means.data_ptr()), static_cast<size_t>(means.nbytes())});
}

void ExchangedPages::await_means(int64_t layer, int64_t chunk) {
  int64_t& until = means_until_[static_cast<size_t>(layer)];
  ExchangeCounts& sum = counts(layer);
  const WaitTimer timer(&sum.means_seconds);
  for (; until < chunk; ++until) {
    if (owns(until)) continue;
    std::vector<std::byte> bytes = exchange_->take_means(layer, until, deadline());
    at::Tensor rows = pages_.means[static_cast<size_t>(layer)].narrow(0, pages_.grid.first_page_of(until),
                                                                      pages_.grid.pages_of(until));
    if (static_cast<int64_t>(bytes.size()) != static_cast<int64_t>(rows.nbytes())) {
      throw comm::ProtocolError("the means of " + comm::describe(shape_.id, layer, until) + " have " +
                                std::to_string(bytes.size()) + " bytes instead of " + std::to_string(rows.nbytes()));
    }
    ++sum.means_received;
    sum.means_bytes += static_cast<int64_t>(bytes.size());
    if (bytes.empty()) continue;
    rows.copy_(at::from_blob(bytes.data(), rows.sizes(), rows.options().device(at::kCPU)));
  }
}

int64_t ExchangedPages::max_pages_at_once() const {
  // With room for all that a chunk touches, a block that is read and the next one fit together in any case.
  const int64_t share = cache_->share(), all = options_.slots.staging / 2;
  return std::max<int64_t>(share >= all ? share : share / 2, 1);
}

// The distinct pages of a range that belong to others, ascending.
std::vector<int64_t> ExchangedPages::remote_pages(const SelectedRange& range) const {
  const attention::Selection& selection = *range.selection;
  std::vector<int64_t> out;
  const auto is_remote = [&](int64_t page) { return !owns(shape_.chunk_of(page)); };
  if (selection.all_past) {
    for (int64_t page = range.page; page < range.page + range.num_pages; ++page) {
      if (is_remote(page)) out.push_back(page);
    }
    return out;
  }
  // A selection that was just made may still be on its way to the host.
  at::Tensor host = selection.host;
  if (!host.defined()) {
    host = selection.pages.to(at::kCPU);
  } else if (selection.pages.defined()) {
    synchronise(options_.types.device);
  }
  const int32_t* places = host.const_data_ptr<int32_t>();
  std::vector<bool> seen(static_cast<size_t>(shape_.num_pages), false);
  for (int64_t tile = range.tile; tile < range.tile + range.num_tiles; ++tile) {
    for (int64_t j = range.page; j < range.page + range.num_pages; ++j) {
      seen[static_cast<size_t>(places[tile * selection.pages_per_tile + j])] = true;
    }
  }
  for (int64_t page = 0; page < shape_.num_pages; ++page) {
    if (seen[static_cast<size_t>(page)] && is_remote(page)) out.push_back(page);
  }
  return out;
}

void ExchangedPages::count_reads(const SelectedRange& range, const PageCache::Counts& before) {
  ExchangeCounts& sum = counts(range.layer);
  const int64_t fetched = cache_->counts().fetched - before.fetched;
  sum.pages_fetched += fetched;
  sum.page_bytes += fetched * options_.layout.kv_slot_bytes;
  sum.page_hits += cache_->counts().hits - before.hits;
  if (fetching_.layer != range.layer || fetching_.chunk != range.chunk) fetching_ = {range.layer, range.chunk, 0};
  fetching_.pages += fetched;
  ledger_.most_pages_per_chunk = std::max(ledger_.most_pages_per_chunk, fetching_.pages);
}

void ExchangedPages::expect(const SelectedRange& range) {
  const std::vector<int64_t> pages = remote_pages(range);
  if (pages.empty()) return;
  const PageCache::Counts before = cache_->counts();
  cache_->expect(range.layer, pages);
  count_reads(range, before);
}

void ExchangedPages::make_readable(const SelectedRange& range) {
  const std::vector<int64_t> pages = remote_pages(range);
  if (pages.empty()) return;
  const PageCache::Counts before = cache_->counts();
  std::vector<void*> addresses;
  {
    const WaitTimer timer(&counts(range.layer).page_seconds);
    addresses = cache_->read(range.layer, pages, deadline());
  }
  count_reads(range, before);
  const auto device = options_.types.device;
  pages_.home_addresses[range.layer].index_copy_(0, to_device(pages, device), addresses_to_device(addresses, device));
}

GradientSlots ExchangedPages::gradient_slots(int64_t layer, int64_t /*from_chunk*/, std::span<const int32_t> pages) {
  std::vector<int64_t> remote;
  for (const int32_t page : pages) {
    if (!owns(shape_.chunk_of(page))) remote.push_back(page);
  }
  std::vector<ContributionStaging::Place> places;
  {
    const WaitTimer timer(&counts(layer).contribution_seconds);
    places = staging_->places(remote, deadline());
  }
  GradientSlots out;
  auto next = places.begin();
  for (const int32_t page : pages) {
    if (owns(shape_.chunk_of(page))) {
      append_local_slot(*pages_.table, layer, page, &out);
    } else {
      out.slots.push_back(next->slot);
      out.first.push_back(next->first ? 1 : 0);
      ++next;
    }
  }
  return out;
}

void ExchangedPages::finish(int64_t layer, int64_t chunk) {
  synchronise(options_.types.device);  // contributions are summed, pages are read
  counts(layer).contributions_sent += staging_->announce(layer, chunk, shape_.pages_per_chunk);
  exchange_->finish(layer, chunk);
}

void ExchangedPages::complete(int64_t layer, int64_t chunk) {
  // Later contributions came when the own chunk after this one was completed.
  const int64_t end = std::min(chunk + num_workers(), shape_.num_chunks());
  for (int64_t from = end - 1; from > chunk; --from) take_contributions(layer, from);
  {
    const WaitTimer timer(&counts(layer).contribution_seconds);
    exchange_->wait_complete(layer, chunk, deadline());
  }
  if (chunk + 1 == shape_.num_chunks()) return;  // nobody reads the last chunk's pages: they have no homes
  const int64_t first = pages_.grid.first_page_of(chunk);
  for (int64_t page = first; page < first + pages_.grid.pages_of(chunk); ++page) {
    transport_->mark_freed(pages_.table->home(layer, page), options_.layout.kv_slot_bytes);
  }
}

void ExchangedPages::take_contributions(int64_t layer, int64_t from_chunk) {
  std::vector<comm::Contribution> notes;
  {
    const WaitTimer timer(&counts(layer).contribution_seconds);
    notes = exchange_->take_contributions(layer, from_chunk, deadline());
  }
  // As many notes at once as the landing area takes; one fits in any case.
  std::span<const comm::Contribution> rest(notes);
  while (!rest.empty()) {
    size_t count = 0;
    int64_t num_pages = 0;
    while (count < rest.size()) {
      num_pages += static_cast<int64_t>(rest[count].pages.size());
      if (num_pages > options_.slots.landing && count > 0) break;
      ++count;
    }
    fetch_and_add(layer, rest.first(count));
    rest = rest.subspan(count);
  }
}

void ExchangedPages::fetch_and_add(int64_t layer, std::span<const comm::Contribution> notes) {
  const int64_t slot_bytes = aligned(options_.layout.gradient_slot_bytes);
  ExchangeCounts& sum = counts(layer);
  GradientSlots slots;
  int64_t landed = 0;
  std::vector<comm::Ticket> tickets;
  for (const comm::Contribution& note : notes) {
    std::vector<void*> to;
    for (const comm::StagedPage& staged : note.pages) {
      if (landed == options_.slots.landing) {
        throw comm::ProtocolError("worker " + std::to_string(note.peer) + " announces more than " +
                                  std::to_string(options_.slots.landing) + " pages at once");
      }
      append_local_slot(*pages_.table, layer, staged.page, &slots);
      to.push_back(landing_ + landed++ * slot_bytes);
    }
    tickets.push_back(exchange_->get_staged(note, to, kind_));
  }
  {
    const WaitTimer timer(&sum.contribution_seconds);
    for (const comm::Ticket ticket : tickets) exchange_->wait(ticket, deadline());
  }
  for (const comm::Contribution& note : notes) exchange_->acknowledge(note);
  sum.contributions_fetched += landed;
  sum.contribution_bytes += landed * slot_bytes;

  const kernels::PageShape& shape = options_.shape;
  const auto device = options_.types.device;
  const int64_t tokens = shape.page_tokens, heads = shape.kv_heads, dim = shape.head_dim;
  const auto element = static_cast<int64_t>(c10::elementSize(options_.gradient_dtype));
  const at::Tensor gradients = at::from_blob(
      landing_, {landed, 2, heads, tokens, dim}, {slot_bytes / element, heads * tokens * dim, tokens * dim, dim, 1},
      at::TensorOptions().dtype(options_.gradient_dtype).device(kind_ == comm::MemoryKind::kCuda ? device : at::kCPU));
  const at::Tensor dk = gradients.select(1, 0).contiguous().to(device);
  const at::Tensor dv = gradients.select(1, 1).contiguous().to(device);
  attention::GradientPlaces places;
  places.begin.resize(static_cast<size_t>(landed) + 1);
  std::iota(places.begin.begin(), places.begin.end(), int64_t{0});
  places.sources.resize(static_cast<size_t>(landed));
  std::iota(places.sources.begin(), places.sources.end(), int32_t{0});
  attention::add_to_slots(shape, dk, dv, places, slots, options_.gradient_dtype);
  synchronise(device);  // before the landing area is used again
}

}  // namespace oomb::cluster
