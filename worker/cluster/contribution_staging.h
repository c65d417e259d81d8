// The gradients that one own chunk has, at one layer, for pages of other workers: summed in staging slots, then
// announced to the owners, who fetch them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "comm/exchange/page_exchange.h"

namespace oomb::cluster {

/// Not thread-safe.
class ContributionStaging {
 public:
  /// `memory` is that of the exchange's staging: num_slots slots of slot_bytes. At most `pages_per_note` pages are
  /// announced at once, so that an owner can fetch a note in one go. The transport is told what is readable.
  ContributionStaging(comm::PageExchange* exchange, comm::Transport* transport, char* memory, int64_t slot_bytes,
                      int64_t pages_per_note)
      : exchange_(exchange),
        transport_(transport),
        memory_(memory),
        slot_bytes_(slot_bytes),
        pages_per_note_(pages_per_note) {}

  struct Place {
    void* slot = nullptr;
    bool first = false;  ///< the slot holds nothing yet
  };
  /// A place for each page (distinct), all of the same layer and chunk until announce(). Waits for acknowledgements of
  /// earlier contributions when slots are short.
  std::vector<Place> places(std::span<const int64_t> pages, comm::Deadline deadline);
  /// Tells the owners about every page that was given a place, which must be complete in memory. Returns how many.
  int64_t announce(int64_t layer, int64_t from_chunk, int64_t pages_per_chunk);

 private:
  comm::PageExchange* exchange_;
  comm::Transport* transport_;
  char* memory_;
  int64_t slot_bytes_;
  int64_t pages_per_note_;
  std::map<int64_t, int64_t> slot_of_;  // by page, ascending: pages of one target chunk lie together
};

}  // namespace oomb::cluster
