// The owner's ledger of one sequence: which gradients of its pages were announced, fetched, and are still to come.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "comm/exchange/keys.h"

namespace oomb::comm {

/// How many pages a contributing chunk announced for one chunk of the owner.
struct MarkerCount {
  std::int64_t target_chunk = 0;
  std::int64_t pages = 0;
};

/// Completion rests on counts: a marker may overtake the notes it counts, and a chunk that contributed nothing says so.
/// Memory: about 100 bytes per layer and pair of chunks, and the notes that were not taken. Not thread-safe.
class ContributionInbox {
 public:
  ContributionInbox(const SequenceShape& shape, int rank);

  /// False for a duplicate. ProtocolError when the note cannot be: no such layer, chunk or page, the target is not this
  /// worker's or not earlier, the contributing chunk is not the peer's, or more pages than the marker counted.
  bool add_note(const Contribution& note);
  /// `counts` has one entry for each chunk of this worker before `from_chunk`. False for a duplicate.
  bool add_marker(int peer, std::int64_t layer, std::int64_t from_chunk, std::span<const MarkerCount> counts);

  /// Whether the marker of (layer, from_chunk) and every page it counted are in.
  bool all_in(std::int64_t layer, std::int64_t from_chunk) const;
  /// Notes of (layer, from_chunk) that were not taken, by target chunk and first page.
  std::vector<Contribution> take(std::int64_t layer, std::int64_t from_chunk);
  /// The oldest note that was not taken.
  std::optional<Contribution> take_oldest();
  /// A taken note's gradients are fetched. std::logic_error for a second time.
  void acknowledge(const Contribution& note);

  /// All later chunks of other workers have finished the layer, and what they announced for `chunk` is acknowledged.
  bool complete(std::int64_t layer, std::int64_t chunk) const;
  /// Why not: the last later chunk with a marker or pages outstanding. -1 if it is complete.
  std::int64_t first_missing(std::int64_t layer, std::int64_t chunk) const;
  /// Whether everything that keeps (layer, chunk) from being complete has arrived and waits for acknowledge().
  bool only_acknowledgements_missing(std::int64_t layer, std::int64_t chunk) const;
  std::int64_t num_waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  std::int64_t held_bytes() const;

 private:
  struct Pair {  // of a contributing chunk and one of ours, at a layer
    std::int64_t counted = -1;
    std::int64_t received = 0;
    std::int64_t acknowledged = 0;
  };
  std::size_t index(std::int64_t layer, std::int64_t from_chunk) const;
  Pair& pair(std::int64_t layer, std::int64_t from_chunk, std::int64_t target_chunk);
  const Pair& pair(std::int64_t layer, std::int64_t from_chunk, std::int64_t target_chunk) const;
  void check_source(int peer, std::int64_t layer, std::int64_t from_chunk) const;
  bool mine(std::int64_t chunk) const { return shape_.owner_of(chunk) == rank_; }

  SequenceShape shape_;
  int rank_;
  std::vector<std::int64_t> my_chunks_;
  std::vector<std::int64_t> position_;  // of a chunk in my_chunks_, -1 for other workers' chunks
  std::vector<bool> marker_in_;         // [num_layers, num_chunks]
  std::vector<Pair> pairs_;             // [num_layers, num_chunks, my_chunks_.size()]
  std::deque<Contribution> waiting_;    // not taken, in order of arrival
  std::set<std::pair<int, std::uint64_t>> seen_, unacknowledged_;  // (peer, note)
};

}  // namespace oomb::comm
