#include "worker/cluster/page_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace oomb::cluster {

PageCache::PageCache(comm::PageExchange* exchange, const Options& options)
    : exchange_(exchange), options_(options), slots_(static_cast<size_t>(options.num_slots)) {
  const int64_t per_layer = options.num_slots / std::max<int64_t>(options.num_layers, 1);
  const bool divided = per_layer >= std::max<int64_t>(options.min_share, 1);
  share_ = divided ? per_layer : options.num_slots;
  shares_.resize(divided ? static_cast<size_t>(options.num_layers) : 1);
  int64_t next = 0;
  for (Share& share : shares_) {
    for (int64_t i = 0; i < share_; ++i, ++next) slot(next).place = share.insert(share.end(), next);
  }
}

int64_t* PageCache::find(int64_t layer, int64_t page) {
  const auto found = slot_of_.find(key_of(layer, page));
  return found == slot_of_.end() ? nullptr : &found->second;
}

void PageCache::wait_for(comm::Ticket ticket, comm::Deadline deadline) {
  exchange_->wait(ticket, deadline);
  for (const int64_t number : under_way_.at(ticket)) slot(number).ticket = 0;
  under_way_.erase(ticket);
}

// Gets of the pages that are not there into the least recently used slots that may be taken, as one batch; stops when
// there is none.
template <class MayTake>
void PageCache::fetch(int64_t layer, std::span<const int64_t> pages, comm::Deadline deadline, const MayTake& may_take) {
  Share& share = share_of(layer);
  std::vector<comm::PageFetch> gets;
  std::vector<int64_t> taken;
  bool readers_done = false;
  auto candidate = share.begin();
  for (const int64_t page : pages) {
    if (find(layer, page) != nullptr) continue;
    while (candidate != share.end() && !may_take(slot(*candidate))) ++candidate;
    if (candidate == share.end()) break;
    const int64_t number = *candidate;
    Slot& s = slot(number);
    if (s.page >= 0) {
      if (s.ticket != 0) wait_for(s.ticket, deadline);
      if (!readers_done && options_.before_reuse) options_.before_reuse();
      readers_done = true;
      slot_of_.erase(key_of(s.layer, s.page));
    }
    s.layer = layer;
    s.page = page;
    s.last_read = 0;
    s.fresh = true;
    slot_of_[key_of(layer, page)] = number;
    const auto next = std::next(candidate);
    share.splice(share.end(), share, candidate);
    candidate = next;
    taken.push_back(number);
    gets.push_back({layer, page, memory_of(number), options_.kind});
  }
  if (gets.empty()) return;
  const comm::Ticket ticket = exchange_->get_pages(gets);
  for (const int64_t number : taken) slot(number).ticket = ticket;
  under_way_[ticket] = std::move(taken);
  counts_.fetched += static_cast<int64_t>(gets.size());
}

void PageCache::expect(int64_t layer, std::span<const int64_t> pages) {
  for (const int64_t page : pages) {
    const int64_t* number = find(layer, page);
    if (number != nullptr && slot(*number).last_read != num_reads_) slot(*number).last_read = 0;
  }
  // No slot that could be waited for is taken, so there is nothing to bound.
  fetch(layer, pages, comm::Deadline::max(), [this](const Slot& s) {
    return s.page < 0 || (s.ticket == 0 && s.last_read != 0 && s.last_read != num_reads_);
  });
}

std::vector<void*> PageCache::read(int64_t layer, std::span<const int64_t> pages, comm::Deadline deadline) {
  if (static_cast<int64_t>(pages.size()) > share_) {
    throw std::logic_error("PageCache: " + std::to_string(pages.size()) + " pages asked for at once, a layer has " +
                           std::to_string(share_) + " slots");
  }
  const int64_t now = ++num_reads_;
  Share& share = share_of(layer);
  for (const int64_t page : pages) {
    const int64_t* number = find(layer, page);
    if (number == nullptr) continue;
    Slot& s = slot(*number);
    if (!s.fresh) ++counts_.hits;
    s.last_read = now;
    share.splice(share.end(), share, s.place);
  }
  fetch(layer, pages, deadline, [now](const Slot& s) { return s.last_read != now; });
  std::vector<void*> addresses;
  addresses.reserve(pages.size());
  for (const int64_t page : pages) {
    const int64_t number = *find(layer, page);
    Slot& s = slot(number);
    if (s.ticket != 0) wait_for(s.ticket, deadline);
    s.last_read = now;
    s.fresh = false;
    addresses.push_back(memory_of(number));
  }
  return addresses;
}

void PageCache::clear(comm::Deadline deadline) {
  while (!under_way_.empty()) wait_for(under_way_.begin()->first, deadline);
  slot_of_.clear();
  for (Slot& s : slots_) {
    s.layer = s.page = -1;
    s.last_read = 0;
    s.fresh = false;
  }
}

}  // namespace oomb::cluster
