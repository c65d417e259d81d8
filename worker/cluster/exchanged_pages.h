// A worker of a context-parallel group: chunk s of a sequence belongs to rank (s + offset) mod W, and only the pages
// that chunks select travel, together with the gradients of those pages.
//
// Pages are fetched into a bounded cache and gradients are summed in a bounded staging memory (per own chunk and layer,
// for each remote page), from which the owner fetches them. Owners add them in descending order of the contributing
// chunk, so the bits of a gradient do not depend on what arrives first; with the same selection as one worker, results
// differ from those of one worker by rounding only.
//
// On a GPU, publish() and finish() wait for the stream, as does the first read after a selection: copies and kernels of
// a layer overlap within these bounds only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/page_exchange.h"
#include "kernels/pages.h"
#include "worker/attention/selection.h"
#include "worker/cluster/contribution_staging.h"
#include "worker/cluster/exchange_counts.h"
#include "worker/cluster/page_cache.h"
#include "worker/cluster/page_source.h"
#include "worker/cluster/segment_registry.h"
#include "worker/tensor/glue.h"

namespace oomb::cluster {

/// Slots of the memory through which pages and gradients of other workers pass.
struct TransferSlots {
  int64_t cache = 0;    ///< copies of other workers' pages
  int64_t staging = 0;  ///< gradients for other workers' pages; 0: evaluation only
  int64_t landing = 0;  ///< gradients fetched from other workers, before they are added; equal on all workers
};

/// Most pages of other workers that one chunk can touch at one layer, over all chunks of sequences of this length.
int64_t most_remote_pages(const ChunkGrid& grid, const attention::SelectionRule& rule, int num_workers);
/// Enough for any chunk: staging for two layers, a cache share for each layer while `cache_bytes` suffices.
TransferSlots plan_transfer_slots(const ChunkGrid& grid, const attention::SelectionRule& rule, int num_workers,
                                  const pages::PageLayout& layout, int64_t cache_bytes);

/// Bytes of the memory that holds them.
int64_t transfer_bytes(const TransferSlots& slots, const pages::PageLayout& layout);

class ExchangedPages final : public PageSource {
 public:
  struct Options {
    pages::PageLayout layout;
    kernels::PageShape shape;
    at::ScalarType gradient_dtype = at::kFloat;
    TensorTypes types;
    TransferSlots slots;
    double wait_seconds = 600;  ///< deadline of each wait
  };

  /// `transfer` has transfer_bytes(slots, layout) of `kind`, is aligned to 256 bytes, can be addressed by the device,
  /// and outlives the transport. `homes` has the segments of the page memory. Both must outlive this. Collective:
  /// registers memory.
  ExchangedPages(comm::Transport* transport, const SegmentRegistry* homes, void* transfer, comm::MemoryKind kind,
                 const Options& options);

  /// The sequences that begin from now on belong to this step. Steps ascend; without a call they belong to step 0. The
  /// owner of a sequence's first chunk is its number in the step plus the step, mod W.
  void begin_step(int64_t step);
  const ExchangeLedger& ledger() const { return ledger_; }
  void reset_ledger() { ledger_ = ExchangeLedger(options_.layout.num_layers); }
  comm::PageExchange& exchange() { return *exchange_; }

  int num_workers() const override { return transport_->size(); }
  void begin_sequence(const SequencePages& pages, Work work) override;
  void begin_pass_2() override { pass_ = ExchangePass::pass2; }
  void end_sequence() override;
  bool owns(int64_t chunk) const override { return shape_.owner_of(chunk) == transport_->rank(); }
  void publish(int64_t layer, int64_t chunk) override;
  void await_means(int64_t layer, int64_t chunk) override;
  int64_t max_pages_at_once() const override;
  void expect(const SelectedRange& range) override;
  void make_readable(const SelectedRange& range) override;
  GradientSlots gradient_slots(int64_t layer, int64_t from_chunk, std::span<const int32_t> pages) override;
  void finish(int64_t layer, int64_t chunk) override;
  void complete(int64_t layer, int64_t chunk) override;

 private:
  comm::Deadline deadline() const { return comm::in_seconds(options_.wait_seconds); }
  ExchangeCounts& counts(int64_t layer) { return ledger_.at(pass_, layer); }
  std::vector<int64_t> remote_pages(const SelectedRange& range) const;
  void count_reads(const SelectedRange& range, const PageCache::Counts& before);
  void take_contributions(int64_t layer, int64_t from_chunk);
  void fetch_and_add(int64_t layer, std::span<const comm::Contribution> notes);

  comm::Transport* transport_;
  const SegmentRegistry* homes_;
  Options options_;
  comm::MemoryKind kind_;
  char* landing_ = nullptr;
  std::unique_ptr<comm::PageExchange> exchange_;
  std::unique_ptr<ContributionStaging> staging_;
  std::unique_ptr<PageCache> cache_;
  ExchangeLedger ledger_;

  comm::SequenceId next_id_;
  comm::SequenceShape shape_;  // of the open sequence
  SequencePages pages_;
  ExchangePass pass_ = ExchangePass::pass1;
  std::vector<int64_t> means_until_;  // per layer: means of all chunks before this one are here
  struct {
    int64_t layer = -1, chunk = -1, pages = 0;
  } fetching_;  // pages fetched for this (layer, chunk) so far
};

}  // namespace oomb::cluster
