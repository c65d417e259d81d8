#include "worker/pages/arena.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace oomb::pages {

namespace {
constexpr int64_t kSlotAlignment = 256;
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
}  // namespace

const char* name_of(Tier tier) {
  switch (tier) {
    case Tier::fast:
      return "fast";
    case Tier::host:
      return "host";
  }
  return "?";
}

SegmentSource host_segments() {
  return {[](int64_t bytes) -> void* { return std::aligned_alloc(4096, static_cast<size_t>(round_up(bytes, 4096))); },
          [](void* segment, int64_t) { std::free(segment); }};
}

Arena::Arena(int64_t slot_bytes, int64_t segment_bytes, TierBudget* budget, SegmentSource source)
    : slot_bytes_(round_up(slot_bytes, kSlotAlignment)),
      segment_bytes_(std::max(segment_bytes / slot_bytes_, int64_t{1}) * slot_bytes_),
      budget_(budget),
      source_(std::move(source)) {
  if (slot_bytes <= 0) throw std::logic_error("Arena: slot_bytes " + std::to_string(slot_bytes));
}

Arena::~Arena() {
  for (const Segment& segment : segments_) {
    source_.release(segment.memory, segment.bytes);
    budget_->used_bytes -= segment.bytes;
  }
}

bool Arena::grow() {
  const int64_t room = (budget_->limit_bytes - budget_->used_bytes) / slot_bytes_ * slot_bytes_;
  const int64_t bytes = std::min(segment_bytes_, room);
  if (bytes <= 0) return false;
  void* memory = source_.allocate(bytes);
  if (memory == nullptr) return false;
  segments_.push_back({memory, bytes});
  budget_->used_bytes += bytes;
  budget_->peak_bytes = std::max(budget_->peak_bytes, budget_->used_bytes);
  // Handed out in ascending address order: the list is popped from its end.
  const int64_t count = bytes / slot_bytes_;
  for (int64_t i = count - 1; i >= 0; --i) free_.push_back(static_cast<char*>(memory) + i * slot_bytes_);
  return true;
}

void* Arena::allocate() {
  if (free_.empty() && !grow()) return nullptr;
  void* slot = free_.back();
  free_.pop_back();
  ++in_use_;
  return slot;
}

void Arena::release(void* slot) {
  free_.push_back(slot);
  --in_use_;
}

bool Arena::owns(const void* slot) const {
  const auto address = reinterpret_cast<uintptr_t>(slot);
  return std::any_of(segments_.begin(), segments_.end(), [address](const Segment& segment) {
    const auto begin = reinterpret_cast<uintptr_t>(segment.memory);
    return address >= begin && address - begin < static_cast<uint64_t>(segment.bytes);
  });
}

}  // namespace oomb::pages
