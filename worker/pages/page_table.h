// The pages of one sequence on one worker: K/V homes, gradient slots, and the means that selection reads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "worker/pages/arena.h"

namespace oomb::pages {

/// Sizes of a sequence's pages. L layers, S chunks of at most C tokens, P tokens a page; P divides C.
struct PageLayout {
  int64_t num_layers = 0;
  int64_t num_pages = 0;  ///< ceil(N / P)
  int64_t kv_slot_bytes = 0;
  int64_t gradient_slot_bytes = 0;
};

/// The memory that page tables draw from: two tiers, and in each an arena for homes and one for gradient slots.
/// Lives as long as the worker, so that segments are allocated once. Not thread-safe.
class PageMemory {
 public:
  struct Options {
    int64_t fast_bytes = 0;  ///< 0: no fast tier
    int64_t host_bytes = 0;
    int64_t segment_bytes = int64_t{1} << 30;
    SegmentSource fast = host_segments();
    SegmentSource host = host_segments();
    /// Of homes, where these differ from the above: memory that other workers can read.
    std::optional<SegmentSource> fast_homes, host_homes;
  };
  PageMemory(const PageLayout& layout, const Options& options);

  /// A slot from the fast tier if it has room, else from the host tier. Throws InputError with the bytes needed and
  /// there if neither has.
  void* allocate_home();
  void* allocate_gradient();
  void release_home(void* slot);
  void release_gradient(void* slot);

  const TierBudget& budget(Tier tier) const { return tier == Tier::fast ? fast_ : host_; }
  int64_t slots_in_use() const;

 private:
  void* allocate(Arena& fast, Arena& host, const char* what);

  TierBudget fast_, host_;
  Arena home_fast_, home_host_, gradient_fast_, gradient_host_;
};

/// Homes are written once and stay where they are until they are freed; readers may keep the address until then.
/// Gradient slots come into being at the first contribution. Not thread-safe.
class PageTable {
 public:
  PageTable(const PageLayout& layout, PageMemory* memory);
  ~PageTable();
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  /// Homes for pages [first, first + count) of a layer; already present ones are kept.
  std::vector<void*> make_homes(int64_t layer, int64_t first, int64_t count);
  /// The home of a page; std::logic_error if it was never written or is freed.
  void* home(int64_t layer, int64_t page) const;
  /// The gradient slot, or null if nothing was contributed.
  void* gradient(int64_t layer, int64_t page) const;
  /// The gradient slot, made if needed; `*first` says that it holds nothing yet.
  void* gradient_for_adding(int64_t layer, int64_t page, bool* first);
  /// Frees homes and gradient slots of pages [first, first + count) of a layer.
  void release(int64_t layer, int64_t first, int64_t count);

  int64_t homes_in_use() const { return homes_in_use_; }
  int64_t gradients_in_use() const { return gradients_in_use_; }

 private:
  struct Entry {
    void* home = nullptr;
    void* gradient = nullptr;
  };
  size_t index(int64_t layer, int64_t page) const;

  PageLayout layout_;
  PageMemory* memory_;
  std::vector<Entry> entries_;  // [num_layers, num_pages]
  int64_t homes_in_use_ = 0, gradients_in_use_ = 0;
};

}  // namespace oomb::pages
