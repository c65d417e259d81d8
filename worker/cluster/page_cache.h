// Copies of other workers' pages: a bounded number of slots, filled by one-sided gets.
//
// A copy is only ever dropped, never written back: its page does not change until it is freed, and nobody asks for it
// afterwards. Slots are divided among the layers, each with its own least-recently-used order, since one order over all
// layers would evict a layer's pages just before that layer comes again. Where a layer's share would be below
// `min_share`, all layers use all slots.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "comm/exchange/page_exchange.h"

namespace oomb::cluster {

class PageCache {
 public:
  struct Options {
    int64_t num_slots = 0;
    int64_t slot_bytes = 0;
    int64_t num_layers = 0;
    int64_t min_share = 0;   ///< at most num_slots
    char* memory = nullptr;  ///< num_slots * slot_bytes; must outlive the transport
    comm::MemoryKind kind = comm::MemoryKind::kHost;
    /// Called before slots that were read are overwritten: on a GPU, waits until the readers are done. May be empty.
    std::function<void()> before_reuse;
  };
  struct Counts {
    int64_t fetched = 0, hits = 0;  ///< pages; a page expected and then read counts once, as fetched
  };

  PageCache(comm::PageExchange* exchange, const Options& options);
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  /// Slots that one layer can use.
  int64_t share() const { return share_; }
  /// Starts gets of pages (distinct, of other workers, published) that are not there, while slots can be had without
  /// touching pages of the last read() or pages expected and not yet read. The rest is left to read().
  void expect(int64_t layer, std::span<const int64_t> pages);
  /// Addresses of pages (distinct, at most share() of them), complete in memory; valid until the next read() of any
  /// layer.
  std::vector<void*> read(int64_t layer, std::span<const int64_t> pages, comm::Deadline deadline);
  /// Waits for what is under way and forgets all pages.
  void clear(comm::Deadline deadline);

  const Counts& counts() const { return counts_; }

 private:
  struct Slot {
    int64_t layer = -1, page = -1;  // -1: empty
    comm::Ticket ticket = 0;        // of the get that fills it; 0: filled
    int64_t last_read = 0;          // number of the read() that used it last; 0: expected, and not read since
    bool fresh = false;             // fetched and never read
    std::list<int64_t>::iterator place;
  };
  using Share = std::list<int64_t>;  // slots, least recently used first; empty ones in front
  Share& share_of(int64_t layer) { return shares_[shares_.size() == 1 ? 0 : static_cast<size_t>(layer)]; }
  int64_t key_of(int64_t layer, int64_t page) const { return page * options_.num_layers + layer; }
  Slot& slot(int64_t number) { return slots_[static_cast<size_t>(number)]; }
  char* memory_of(int64_t number) const { return options_.memory + number * options_.slot_bytes; }
  int64_t* find(int64_t layer, int64_t page);
  void wait_for(comm::Ticket ticket, comm::Deadline deadline);
  template <class MayTake>
  void fetch(int64_t layer, std::span<const int64_t> pages, comm::Deadline deadline, const MayTake& may_take);

  comm::PageExchange* exchange_;
  Options options_;
  int64_t share_ = 0;
  std::vector<Slot> slots_;
  std::vector<Share> shares_;
  std::unordered_map<int64_t, int64_t> slot_of_;                      // by key
  std::unordered_map<comm::Ticket, std::vector<int64_t>> under_way_;  // slots of each batch
  int64_t num_reads_ = 0;
  Counts counts_;
};

}  // namespace oomb::cluster
