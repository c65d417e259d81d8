#include "worker/cluster/contribution_staging.h"

namespace oomb::cluster {

std::vector<ContributionStaging::Place> ContributionStaging::places(std::span<const int64_t> pages,
                                                                    comm::Deadline deadline) {
  int64_t missing = 0;
  for (const int64_t page : pages) missing += slot_of_.contains(page) ? 0 : 1;
  const std::vector<int64_t> fresh =
      missing > 0 ? exchange_->acquire_staging(missing, deadline) : std::vector<int64_t>();
  std::vector<Place> out;
  out.reserve(pages.size());
  auto next = fresh.begin();
  for (const int64_t page : pages) {
    const auto found = slot_of_.find(page);
    const bool first = found == slot_of_.end();
    const int64_t slot = first ? *next++ : found->second;
    if (first) slot_of_.emplace(page, slot);
    out.push_back({memory_ + slot * slot_bytes_, first});
  }
  return out;
}

int64_t ContributionStaging::announce(int64_t layer, int64_t from_chunk, int64_t pages_per_chunk) {
  std::vector<comm::PageExchange::Staged> note;
  int64_t target = -1;
  const auto send = [&] {
    if (!note.empty()) exchange_->announce(layer, target, from_chunk, note);
    note.clear();
  };
  for (const auto& [page, slot] : slot_of_) {
    const int64_t chunk = page / pages_per_chunk;
    if (chunk != target || static_cast<int64_t>(note.size()) == pages_per_note_) send();
    target = chunk;
    transport_->mark_readable(memory_ + slot * slot_bytes_, slot_bytes_);
    note.push_back({page, slot});
  }
  send();
  const auto count = static_cast<int64_t>(slot_of_.size());
  slot_of_.clear();
  return count;
}

}  // namespace oomb::cluster
