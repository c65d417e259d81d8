// Memory for page slots: fixed-size slots cut from large segments, one arena per tier and slot size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace oomb::pages {

/// Where a slot lives. `fast` is the GPU's memory (or a plain buffer on a CPU-only worker), `host` is pinned host
/// memory.
enum class Tier : uint8_t { fast, host };
const char* name_of(Tier tier);

/// How an arena gets and returns its segments. `allocate` returns null when the memory is not there.
struct SegmentSource {
  std::function<void*(int64_t bytes)> allocate;
  std::function<void(void* segment, int64_t bytes)> release;
};
/// Plain host memory, 4096-byte aligned.
SegmentSource host_segments();

/// Bytes that arenas of one tier may take together, and what they took. Not thread-safe.
struct TierBudget {
  Tier tier = Tier::host;
  int64_t limit_bytes = 0;
  int64_t used_bytes = 0;  ///< sum of segment sizes
  int64_t peak_bytes = 0;
};

/// Slots of one size in one tier. Grows by segments until the tier's budget is reached; never shrinks before
/// destruction. Not thread-safe. Slots are aligned to 256 bytes.
class Arena {
 public:
  /// `budget` must outlive the arena. Segments have `segment_bytes`, or what is left of the budget if that is less.
  Arena(int64_t slot_bytes, int64_t segment_bytes, TierBudget* budget, SegmentSource source);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// A slot with undefined contents, or null when the budget (or the machine) has no room for one more segment.
  void* allocate();
  void release(void* slot);
  /// Whether `slot` was cut from one of this arena's segments.
  bool owns(const void* slot) const;

  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t slots_in_use() const { return in_use_; }
  Tier tier() const { return budget_->tier; }

 private:
  bool grow();

  struct Segment {
    void* memory = nullptr;
    int64_t bytes = 0;
  };
  int64_t slot_bytes_, segment_bytes_;
  TierBudget* budget_;
  SegmentSource source_;
  std::vector<Segment> segments_;
  std::vector<void*> free_;
  int64_t in_use_ = 0;
};

}  // namespace oomb::pages
