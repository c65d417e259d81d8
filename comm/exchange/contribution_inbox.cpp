#include "comm/exchange/contribution_inbox.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace oomb::comm {

ContributionInbox::ContributionInbox(const SequenceShape& shape, int rank)
    : shape_(shape), rank_(rank), position_(static_cast<std::size_t>(shape.num_chunks()), -1) {
  for (std::int64_t chunk = 0; chunk < shape_.num_chunks(); ++chunk) {
    if (!mine(chunk)) continue;
    position_[static_cast<std::size_t>(chunk)] = static_cast<std::int64_t>(my_chunks_.size());
    my_chunks_.push_back(chunk);
  }
  const std::int64_t sources = shape_.num_layers * shape_.num_chunks();
  marker_in_.resize(static_cast<std::size_t>(sources));
  pairs_.resize(static_cast<std::size_t>(sources) * my_chunks_.size());
}

std::size_t ContributionInbox::index(std::int64_t layer, std::int64_t from_chunk) const {
  if (layer < 0 || layer >= shape_.num_layers || from_chunk < 0 || from_chunk >= shape_.num_chunks()) {
    throw std::logic_error("no such place: " + describe(shape_.id, layer, from_chunk));
  }
  return static_cast<std::size_t>(layer * shape_.num_chunks() + from_chunk);
}

const ContributionInbox::Pair& ContributionInbox::pair(std::int64_t layer, std::int64_t from_chunk,
                                                       std::int64_t target_chunk) const {
  return pairs_[index(layer, from_chunk) * my_chunks_.size() +
                static_cast<std::size_t>(position_.at(static_cast<std::size_t>(target_chunk)))];
}

ContributionInbox::Pair& ContributionInbox::pair(std::int64_t layer, std::int64_t from_chunk,
                                                 std::int64_t target_chunk) {
  return const_cast<Pair&>(std::as_const(*this).pair(layer, from_chunk, target_chunk));
}

void ContributionInbox::check_source(int peer, std::int64_t layer, std::int64_t from_chunk) const {
  if (layer < 0 || layer >= shape_.num_layers || from_chunk < 0 || from_chunk >= shape_.num_chunks() ||
      shape_.owner_of(from_chunk) != peer) {
    throw ProtocolError("worker " + std::to_string(peer) + " contributes from " +
                        describe(shape_.id, layer, from_chunk) + ", which is not its own");
  }
}

bool ContributionInbox::add_note(const Contribution& note) {
  check_source(note.peer, note.layer, note.from_chunk);
  const std::string what = "a contribution of chunk " + std::to_string(note.from_chunk) + " to " +
                           describe(shape_.id, note.layer, note.target_chunk);
  if (note.target_chunk < 0 || note.target_chunk >= note.from_chunk || !mine(note.target_chunk)) {
    throw ProtocolError(what + ": not an earlier chunk of worker " + std::to_string(rank_));
  }
  for (const StagedPage& staged : note.pages) {
    if (staged.page < 0 || staged.page >= shape_.num_pages || shape_.chunk_of(staged.page) != note.target_chunk) {
      throw ProtocolError(what + " names page " + std::to_string(staged.page) + ", which is not of that chunk");
    }
  }
  if (seen_.contains({note.peer, note.note})) return false;
  Pair& counts = pair(note.layer, note.from_chunk, note.target_chunk);
  const std::int64_t received = counts.received + static_cast<std::int64_t>(note.pages.size());
  if (counts.counted >= 0 && received > counts.counted) {
    throw ProtocolError(what + ": " + std::to_string(received) + " pages where its marker counted " +
                        std::to_string(counts.counted));
  }
  counts.received = received;
  seen_.emplace(note.peer, note.note);
  unacknowledged_.emplace(note.peer, note.note);
  waiting_.push_back(note);
  return true;
}

bool ContributionInbox::add_marker(int peer, std::int64_t layer, std::int64_t from_chunk,
                                   std::span<const MarkerCount> counts) {
  check_source(peer, layer, from_chunk);
  const std::size_t source = index(layer, from_chunk);
  if (marker_in_[source]) return false;
  const std::string what = "the marker of " + describe(shape_.id, layer, from_chunk);
  const auto earlier = std::lower_bound(my_chunks_.begin(), my_chunks_.end(), from_chunk) - my_chunks_.begin();
  if (static_cast<std::int64_t>(counts.size()) != earlier) {
    throw ProtocolError(what + " counts " + std::to_string(counts.size()) + " chunks instead of " +
                        std::to_string(earlier));
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i].target_chunk != my_chunks_[i] || counts[i].pages < 0) {
      throw ProtocolError(what + " counts chunk " + std::to_string(counts[i].target_chunk) + " in place " +
                          std::to_string(i));
    }
    const Pair& entry = pair(layer, from_chunk, counts[i].target_chunk);
    if (entry.received > counts[i].pages) {
      throw ProtocolError(what + " counts " + std::to_string(counts[i].pages) + " pages where " +
                          std::to_string(entry.received) + " were announced");
    }
  }
  for (const MarkerCount& count : counts) pair(layer, from_chunk, count.target_chunk).counted = count.pages;
  marker_in_[source] = true;
  return true;
}

bool ContributionInbox::all_in(std::int64_t layer, std::int64_t from_chunk) const {
  if (!marker_in_[index(layer, from_chunk)]) return false;
  for (const std::int64_t target : my_chunks_) {
    if (target >= from_chunk) break;
    const Pair& entry = pair(layer, from_chunk, target);
    if (entry.received != entry.counted) return false;
  }
  return true;
}

std::vector<Contribution> ContributionInbox::take(std::int64_t layer, std::int64_t from_chunk) {
  std::vector<Contribution> taken;
  std::deque<Contribution> left;
  for (Contribution& note : waiting_) {
    if (note.layer == layer && note.from_chunk == from_chunk) {
      taken.push_back(std::move(note));
    } else {
      left.push_back(std::move(note));
    }
  }
  waiting_ = std::move(left);
  const auto order = [](const Contribution& note) {
    return std::tuple(note.target_chunk, note.pages.empty() ? -1 : note.pages.front().page, note.note);
  };
  std::sort(taken.begin(), taken.end(),
            [&](const Contribution& a, const Contribution& b) { return order(a) < order(b); });
  return taken;
}

std::optional<Contribution> ContributionInbox::take_oldest() {
  if (waiting_.empty()) return std::nullopt;
  Contribution oldest = std::move(waiting_.front());
  waiting_.pop_front();
  return oldest;
}

void ContributionInbox::acknowledge(const Contribution& note) {
  if (unacknowledged_.erase({note.peer, note.note}) == 0) {
    throw std::logic_error("note " + std::to_string(note.note) + " of worker " + std::to_string(note.peer) +
                           " is unknown or was acknowledged before");
  }
  pair(note.layer, note.from_chunk, note.target_chunk).acknowledged += static_cast<std::int64_t>(note.pages.size());
}

bool ContributionInbox::complete(std::int64_t layer, std::int64_t chunk) const {
  return first_missing(layer, chunk) < 0;
}

std::int64_t ContributionInbox::first_missing(std::int64_t layer, std::int64_t chunk) const {
  if (chunk < 0 || chunk >= shape_.num_chunks() || !mine(chunk)) {
    throw std::logic_error("not an own chunk: " + describe(shape_.id, layer, chunk));
  }
  for (std::int64_t from = shape_.num_chunks() - 1; from > chunk; --from) {
    if (mine(from)) continue;
    const Pair& entry = pair(layer, from, chunk);
    if (!marker_in_[index(layer, from)] || entry.acknowledged != entry.counted) return from;
  }
  return -1;
}

bool ContributionInbox::only_acknowledgements_missing(std::int64_t layer, std::int64_t chunk) const {
  if (complete(layer, chunk)) return false;
  for (std::int64_t from = chunk + 1; from < shape_.num_chunks(); ++from) {
    if (mine(from)) continue;
    const Pair& entry = pair(layer, from, chunk);
    if (!marker_in_[index(layer, from)] || entry.received != entry.counted) return false;
  }
  return true;
}

std::int64_t ContributionInbox::held_bytes() const {
  std::int64_t bytes = 0;
  for (const Contribution& note : waiting_) {
    bytes += static_cast<std::int64_t>(sizeof(Contribution) + note.pages.size() * sizeof(StagedPage));
  }
  return bytes;
}

}  // namespace oomb::comm
