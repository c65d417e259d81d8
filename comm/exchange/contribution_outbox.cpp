#include "comm/exchange/contribution_outbox.h"

#include <stdexcept>
#include <string>

namespace oomb::comm {

StagingSlots::StagingSlots(std::int64_t num_slots)
    : num_slots_(num_slots), taken_(static_cast<std::size_t>(num_slots), false) {
  // The lowest slot is taken first, so that little staging touches little memory.
  for (std::int64_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

std::vector<std::int64_t> StagingSlots::take(std::int64_t count) {
  if (count < 0 || count > num_free()) {
    throw std::logic_error(std::to_string(count) + " staging slots asked for, " + std::to_string(num_free()) + " free");
  }
  std::vector<std::int64_t> slots;
  slots.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    slots.push_back(free_.back());
    free_.pop_back();
    taken_[static_cast<std::size_t>(slots.back())] = true;
  }
  return slots;
}

void StagingSlots::give_back(std::span<const std::int64_t> slots) {
  for (const std::int64_t slot : slots) {
    if (slot < 0 || slot >= num_slots_ || !taken_[static_cast<std::size_t>(slot)]) {
      throw std::logic_error("staging slot " + std::to_string(slot) + " is not in use");
    }
    taken_[static_cast<std::size_t>(slot)] = false;
    free_.push_back(slot);
  }
}

ContributionOutbox::ContributionOutbox(const SequenceShape& shape, int rank, StagingSlots* slots)
    : shape_(shape),
      rank_(rank),
      slots_(slots),
      finished_(static_cast<std::size_t>(shape.num_layers * shape.num_chunks())),
      last_note_(static_cast<std::size_t>(shape.num_workers)) {}

void ContributionOutbox::check_own(std::int64_t layer, std::int64_t from_chunk) const {
  if (layer < 0 || layer >= shape_.num_layers || from_chunk < 0 || from_chunk >= shape_.num_chunks() ||
      shape_.owner_of(from_chunk) != rank_) {
    throw std::logic_error("not an own chunk: " + describe(shape_.id, layer, from_chunk));
  }
  if (finished_[static_cast<std::size_t>(layer * shape_.num_chunks() + from_chunk)]) {
    throw std::logic_error("finished before: " + describe(shape_.id, layer, from_chunk));
  }
}

std::uint64_t ContributionOutbox::announce(std::int64_t layer, std::int64_t target_chunk, std::int64_t from_chunk,
                                           std::span<const std::int64_t> pages, std::vector<std::int64_t> slots) {
  check_own(layer, from_chunk);
  if (target_chunk < 0 || target_chunk >= from_chunk || shape_.owner_of(target_chunk) == rank_) {
    throw std::logic_error("chunk " + std::to_string(target_chunk) + " is no earlier chunk of another worker than " +
                           describe(shape_.id, layer, from_chunk));
  }
  for (const std::int64_t page : pages) {
    if (page < 0 || page >= shape_.num_pages || shape_.chunk_of(page) != target_chunk) {
      throw std::logic_error("page " + std::to_string(page) + " is not of chunk " + std::to_string(target_chunk));
    }
  }
  counts_[{layer, from_chunk}][target_chunk] += static_cast<std::int64_t>(pages.size());
  const int owner = shape_.owner_of(target_chunk);
  const std::uint64_t note = ++last_note_[static_cast<std::size_t>(owner)];
  outstanding_[{owner, note}] = std::move(slots);
  return note;
}

std::vector<std::vector<MarkerCount>> ContributionOutbox::finish(std::int64_t layer, std::int64_t from_chunk) {
  check_own(layer, from_chunk);
  finished_[static_cast<std::size_t>(layer * shape_.num_chunks() + from_chunk)] = true;
  std::map<std::int64_t, std::int64_t> counts;
  if (const auto found = counts_.find({layer, from_chunk}); found != counts_.end()) {
    counts = std::move(found->second);
    counts_.erase(found);
  }
  std::vector<std::vector<MarkerCount>> markers(static_cast<std::size_t>(shape_.num_workers));
  for (std::int64_t target = 0; target < from_chunk; ++target) {
    const int owner = shape_.owner_of(target);
    if (owner == rank_) continue;
    const auto found = counts.find(target);
    markers[static_cast<std::size_t>(owner)].push_back({target, found == counts.end() ? 0 : found->second});
  }
  return markers;
}

bool ContributionOutbox::acknowledged(int owner, std::uint64_t note) {
  if (owner < 0 || owner >= shape_.num_workers || note == 0 || note > last_note_[static_cast<std::size_t>(owner)]) {
    throw ProtocolError("worker " + std::to_string(owner) + " acknowledges note " + std::to_string(note) +
                        ", which it was never sent");
  }
  const auto found = outstanding_.find({owner, note});
  if (found == outstanding_.end()) return false;
  slots_->give_back(found->second);
  outstanding_.erase(found);
  return true;
}

}  // namespace oomb::comm
