// The contributor's ledger of one sequence: staging slots in use, and what each contributing chunk announced.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "comm/exchange/contribution_inbox.h"
#include "comm/exchange/keys.h"

namespace oomb::comm {

/// Free slots 0..n-1 of the staging memory; it outlives sequences. Not thread-safe.
class StagingSlots {
 public:
  explicit StagingSlots(std::int64_t num_slots);
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_slots() const { return num_slots_; }
  /// std::logic_error when fewer than `count` are free.
  std::vector<std::int64_t> take(std::int64_t count);
  void give_back(std::span<const std::int64_t> slots);

 private:
  std::int64_t num_slots_;
  std::vector<std::int64_t> free_;
  std::vector<bool> taken_;
};

/// Memory: what is announced and not acknowledged, and one bit per layer and chunk. Not thread-safe.
class ContributionOutbox {
 public:
  ContributionOutbox(const SequenceShape& shape, int rank, StagingSlots* slots);

  /// Numbers the note and counts its pages. std::logic_error when the chunks are not an own one and an earlier one of
  /// another worker, a page is not of the target, or the contributing chunk has finished the layer.
  std::uint64_t announce(std::int64_t layer, std::int64_t target_chunk, std::int64_t from_chunk,
                         std::span<const std::int64_t> pages, std::vector<std::int64_t> slots);
  /// What the marker tells each other worker: entry r for rank r, empty for the own one.
  std::vector<std::vector<MarkerCount>> finish(std::int64_t layer, std::int64_t from_chunk);
  /// The owner has the note's gradients: its slots are free. False for a duplicate; ProtocolError for a note that was
  /// never announced.
  bool acknowledged(int owner, std::uint64_t note);
  std::int64_t outstanding() const { return static_cast<std::int64_t>(outstanding_.size()); }
  /// A worker that has a note of ours and did not acknowledge it; -1 if there is none.
  int slowest_owner() const { return outstanding_.empty() ? -1 : outstanding_.begin()->first.first; }

 private:
  void check_own(std::int64_t layer, std::int64_t from_chunk) const;

  SequenceShape shape_;
  int rank_;
  StagingSlots* slots_;
  std::vector<bool> finished_;  // [num_layers, num_chunks]
  std::map<std::pair<std::int64_t, std::int64_t>, std::map<std::int64_t, std::int64_t>> counts_;  // by (layer, from)
  std::vector<std::uint64_t> last_note_;                                                          // by owner
  std::map<std::pair<int, std::uint64_t>, std::vector<std::int64_t>> outstanding_;  // (owner, note) -> slots
};

}  // namespace oomb::comm
