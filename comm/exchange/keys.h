// Names of what is exchanged. Every message carries its SequenceId, so nothing of an earlier sequence is ever mistaken.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/exchange/transport.h"

namespace oomb::comm {

/// A sequence of a run. The workers of a group take them in ascending order; `sequence` counts within the step.
struct SequenceId {
  std::int64_t step = 0;
  std::int64_t sequence = 0;
  auto operator<=>(const SequenceId&) const = default;
};

/// How a sequence is cut and who owns what: chunk s belongs to rank (s + first_owner) mod num_workers, page p to chunk
/// p / pages_per_chunk. The last chunk may have fewer pages.
struct SequenceShape {
  SequenceId id;
  std::int64_t num_layers = 0;
  std::int64_t num_pages = 0;
  std::int64_t pages_per_chunk = 0;
  int num_workers = 1;
  int first_owner = 0;

  std::int64_t num_chunks() const { return (num_pages + pages_per_chunk - 1) / pages_per_chunk; }
  std::int64_t pages_of(std::int64_t chunk) const {
    const std::int64_t left = num_pages - chunk * pages_per_chunk;
    return left < pages_per_chunk ? left : pages_per_chunk;
  }
  std::int64_t chunk_of(std::int64_t page) const { return page / pages_per_chunk; }
  int owner_of(std::int64_t chunk) const { return static_cast<int>((chunk + first_owner) % num_workers); }
};

/// "layer 3, chunk 5 of sequence 0, step 7", for errors.
std::string describe(const SequenceId& id, std::int64_t layer, std::int64_t chunk);

/// A page's gradients in the staging memory of the worker that announces them.
struct StagedPage {
  std::int64_t page = 0;  ///< of the sequence
  RemoteAddress address;
};

/// One note: gradients that chunk `from_chunk` has for pages of `target_chunk` at `layer`, waiting at `peer`.
struct Contribution {
  std::int64_t layer = 0;
  std::int64_t target_chunk = 0;
  std::int64_t from_chunk = 0;
  int peer = 0;
  std::uint64_t note = 0;  ///< number of the note at `peer`, from 1
  std::vector<StagedPage> pages;
};

}  // namespace oomb::comm
