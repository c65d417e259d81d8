// The seam between the pipeline of one worker and the group of workers that train a sequence together.
//
// The pipeline works on the chunks that this worker owns and tells the page source what it has done; the source makes
// pages of other workers readable and takes the gradients of them. LocalPages is a group of one: it owns every chunk
// and does nothing. ExchangedPages (exchanged_pages.h) is a worker of a real group.
//
// Order of the calls, per sequence (layer l, own chunk s):
//   begin_sequence
//   pass 1, s ascending, l ascending:   publish, await_means, then in attention expect, make_readable
//   begin_pass_2
//   pass 2, s descending, l ascending:  expect, make_readable (recomputation)
//                         l descending: expect, make_readable, gradient_slots, then finish, complete
//   end_sequence
// Evaluation: finish(l, s) after the attention of each layer, complete for all own (l, s) at the end, no pass 2.
//
// All numbers of chunks and pages are those of the sequence. Threads: one at a time. Errors: comm/errors.h.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "worker/attention/selection.h"
#include "worker/pages/page_table.h"
#include "worker/pipeline/chunk_grid.h"

namespace oomb::cluster {

/// What the pipeline holds of a sequence; valid until end_sequence.
struct SequencePages {
  ChunkGrid grid;
  pages::PageTable* table = nullptr;  ///< homes and gradient slots of own chunks' pages
  at::Tensor home_addresses;          ///< int64 [layers, pages] on the device: where each page can be read
  std::vector<at::Tensor> means;      ///< per layer [pages, Hkv, D], compute dtype; [pages, 0, D] where nobody selects
};

/// Places [tile, tile + num_tiles) x [page, page + num_pages) of the selection of (chunk, layer).
struct SelectedRange {
  const attention::Selection* selection = nullptr;
  int64_t layer = 0, chunk = 0;
  int64_t tile = 0, num_tiles = 0;
  int64_t page = 0, num_pages = 0;
};

/// Where the gradients of a list of pages are summed.
struct GradientSlots {
  std::vector<void*> slots;
  std::vector<uint8_t> first;  ///< 1: the slot holds nothing yet
};

enum class Work : uint8_t { training, evaluation };

class PageSource {
 public:
  virtual ~PageSource() = default;

  virtual int num_workers() const = 0;
  virtual void begin_sequence(const SequencePages& pages, Work work) = 0;
  virtual void begin_pass_2() = 0;
  /// Returns when nothing of the sequence is needed here by others.
  virtual void end_sequence() = 0;
  /// Of the sequence that has begun.
  virtual bool owns(int64_t chunk) const = 0;

  /// Homes and means of an own chunk are written (enqueued, on a GPU).
  virtual void publish(int64_t layer, int64_t chunk) = 0;
  /// Returns when the means of all chunks before `chunk` are in SequencePages::means.
  virtual void await_means(int64_t layer, int64_t chunk) = 0;

  /// Distinct pages that one make_readable may ask for.
  virtual int64_t max_pages_at_once() const = 0;
  /// A make_readable of this range follows soon: transfers may start.
  virtual void expect(const SelectedRange& range) = 0;
  /// Returns when home_addresses of the range's pages can be read, which they stay until the next make_readable.
  virtual void make_readable(const SelectedRange& range) = 0;

  /// Slots for adding what chunk `from_chunk` contributes to `pages` (distinct) at the layer.
  virtual GradientSlots gradient_slots(int64_t layer, int64_t from_chunk, std::span<const int32_t> pages) = 0;
  /// Own chunk `chunk` reads no page of this layer any more, and its contributions are whole (enqueued, on a GPU).
  virtual void finish(int64_t layer, int64_t chunk) = 0;
  /// Returns when the contributions of all later chunks are in the gradient slots of own chunk `chunk`, and nobody
  /// reads its pages any more. Own chunks come in descending order for a layer.
  virtual void complete(int64_t layer, int64_t chunk) = 0;
};

/// A group of one.
class LocalPages final : public PageSource {
 public:
  int num_workers() const override { return 1; }
  void begin_sequence(const SequencePages& pages, Work) override { table_ = pages.table; }
  void begin_pass_2() override {}
  void end_sequence() override { table_ = nullptr; }
  bool owns(int64_t) const override { return true; }
  void publish(int64_t, int64_t) override {}
  void await_means(int64_t, int64_t) override {}
  int64_t max_pages_at_once() const override { return std::numeric_limits<int64_t>::max(); }
  void expect(const SelectedRange&) override {}
  void make_readable(const SelectedRange&) override {}
  GradientSlots gradient_slots(int64_t layer, int64_t from_chunk, std::span<const int32_t> pages) override;
  void finish(int64_t, int64_t) override {}
  void complete(int64_t, int64_t) override {}

 private:
  pages::PageTable* table_ = nullptr;
};

/// Adds the slot of an own page, made if needed.
void append_local_slot(pages::PageTable& table, int64_t layer, int64_t page, GradientSlots* out);

}  // namespace oomb::cluster
