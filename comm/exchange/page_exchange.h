// The protocol of context parallelism on top of a Transport: who may read which page when, and when all gradients of a
// page have arrived. W workers, S chunks, L layers; a page is named by its number in the sequence.
//
// Pass 1, per layer and own chunk: publish() once the home copies are complete (a CUDA event has been waited for); that
// is the release after which peers may read them. take_means() of every earlier chunk of the other workers, select,
// get_pages(), wait().
//
// Pass 2, per layer and own chunk s, as a contributor: gradients of pages of other workers are summed into slots of the
// staging memory (acquire_staging), announce()d per target chunk, and finish(layer, s) ends the chunk: it tells every
// other worker how many pages were announced for each of its chunks, zero too. finish() also says that chunk s will
// read no page of this layer again, so all its gets must have completed. Owners fetch staged gradients, and acknowledge
// them, which frees the slots.
// As an owner: take_contributions(layer, s') for the chunks s' of the other workers, fetch, add, acknowledge().
// Descending s' gives sums whose bits do not depend on the order of arrival. wait_complete(layer, c) returns when all
// later chunks have finished the layer and everything they announced was acknowledged: then dK, dV of chunk c are
// whole, and its pages can be freed, since nobody reads them any more. Without pass 2 (evaluation) finish() alone
// leads to wait_complete() as well.
//
// The twin's check of reads: the caller marks pages readable before publish() and freed when it frees them, and marks a
// staging slot readable before each announce() (Transport::mark_readable).
//
// Messages per layer and sequence, W > 1, all bodies small beside the pages:
//   means           S * (W-1) messages of 28 + 12 * pages_of(chunk) + means bytes
//   contributions   one per announce(), of 40 + 20 * pages bytes; one ack each, of 24 bytes
//   markers         S * (W-1) messages of 28 + 8 * (chunks of that owner before s) bytes
// Gets: what the caller asks for, one per page.
//
// Memory here: un-taken means and the addresses of all pages (16 bytes per layer and page), notes not yet taken, and at
// most `max_early_bytes` of messages for sequences that have not begun here. Duplicates, and messages of sequences that
// have ended here, are counted and dropped.
//
// Errors: PeerLost, DeadlinePassed, Aborted (errors.h), naming what was waited for. A malformed message aborts the
// transport. Threads: any; each take/next call has one consumer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/exchange/keys.h"
#include "comm/exchange/transport.h"

namespace oomb::comm {

/// One page to fetch into local memory; its owner and address are looked up.
struct PageFetch {
  std::int64_t layer = 0;
  std::int64_t page = 0;
  void* to = nullptr;
  MemoryKind to_kind = MemoryKind::kHost;
};

class PageExchange {
 public:
  /// Staged gradients: `num_slots` slots of `slot_bytes` in one registered segment, from `offset` on. With
  /// take_contributions() there must be a slot for every remote page that one chunk touches at a layer, or a worker
  /// waits for acknowledgements that only follow its own finish(); twice as many let two layers overlap.
  struct Staging {
    RemoteAddress base;
    std::int64_t slot_bytes = 0;
    std::int64_t num_slots = 0;
  };
  struct Options {
    std::int64_t page_bytes = 0;  ///< of a K/V home: what get_pages() moves per page
    Staging staging;              ///< num_slots 0: nothing is announced (evaluation)
    std::int64_t max_early_bytes = std::int64_t{256} << 20;
  };
  /// Becomes the transport's sink. The transport must outlive this.
  PageExchange(Transport* transport, const Options& options);
  ~PageExchange();
  PageExchange(const PageExchange&) = delete;
  PageExchange& operator=(const PageExchange&) = delete;

  /// One sequence is open at a time; ids ascend. `num_workers` is the transport's size.
  void begin_sequence(const SequenceShape& shape);
  /// Waits until all own notes are acknowledged, then drops what is left of the sequence.
  void end_sequence(Deadline deadline);

  // --- pages ---------------------------------------------------------------------------------------------------------
  /// Tells all peers where the pages of an own chunk are, and their means. `pages` has pages_of(chunk) entries.
  void publish(std::int64_t layer, std::int64_t chunk, std::span<const RemoteAddress> pages,
               std::span<const std::byte> means);
  bool means_ready(std::int64_t layer, std::int64_t chunk) const;
  /// The means of a chunk of another worker, once each: they are the caller's afterwards.
  std::vector<std::byte> take_means(std::int64_t layer, std::int64_t chunk, Deadline deadline);
  /// Where a page of another worker is. std::logic_error before its chunk was published to us.
  RemoteAddress address_of(std::int64_t layer, std::int64_t page) const;
  /// Gets of pages of other workers; each must have been published. Wait with the transport's rules for tickets.
  Ticket get_pages(std::span<const PageFetch> pages);
  void wait(Ticket ticket, Deadline deadline);

  // --- contributions: the contributor --------------------------------------------------------------------------------
  /// `count` free staging slots, numbered from 0. Waits for acknowledgements when there are too few.
  std::vector<std::int64_t> acquire_staging(std::int64_t count, Deadline deadline);
  /// Page and the slot that holds its gradients, complete in memory.
  struct Staged {
    std::int64_t page = 0;
    std::int64_t slot = 0;
  };
  /// Own chunk `from_chunk` has gradients for these pages of `target_chunk` (another worker's, earlier). May be called
  /// several times per pair; each page at most once per (layer, from_chunk). The slots are free after the owner's ack.
  void announce(std::int64_t layer, std::int64_t target_chunk, std::int64_t from_chunk, std::span<const Staged> pages);
  /// After the last announce() of own chunk `from_chunk` at `layer`, and after its last get there. Once, for every own
  /// chunk and layer, also without contributions.
  void finish(std::int64_t layer, std::int64_t from_chunk);

  // --- contributions: the owner --------------------------------------------------------------------------------------
  /// Everything that chunk `from_chunk` of another worker announced to this worker at `layer`, after waiting for its
  /// finish() and all notes. Sorted by target chunk and first page. Once per (layer, from_chunk), if no
  /// next_contribution() took a part of it.
  std::vector<Contribution> take_contributions(std::int64_t layer, std::int64_t from_chunk, Deadline deadline);
  /// For callers to whom the order of sums does not matter: any one note, the oldest first. Waits until there is one;
  /// nothing when own chunk `chunk` is complete at `layer` instead.
  std::optional<Contribution> next_contribution(std::int64_t layer, std::int64_t chunk, Deadline deadline);
  /// The same without waiting.
  std::optional<Contribution> next_contribution();
  /// The staged bytes of a note, one get per page in its order; `to` has as many targets.
  Ticket get_staged(const Contribution& contribution, std::span<void* const> to, MemoryKind to_kind);
  /// After the gets of the note have completed: the peer may use the slots again.
  void acknowledge(const Contribution& contribution);
  bool is_complete(std::int64_t layer, std::int64_t chunk) const;
  /// See above. std::logic_error when only acknowledgements by the caller itself are missing.
  void wait_complete(std::int64_t layer, std::int64_t chunk, Deadline deadline);

  struct Counters {
    std::int64_t duplicates = 0;
    std::int64_t stale = 0;
    std::int64_t held_bytes = 0;  ///< means not taken, notes not taken, early messages
  };
  Counters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::comm
