#include "worker/pages/page_table.h"

#include <stdexcept>
#include <string>

#include "configs/error.h"

namespace oomb::pages {

PageMemory::PageMemory(const PageLayout& layout, const Options& options)
    : fast_{Tier::fast, options.fast_bytes, 0, 0},
      host_{Tier::host, options.host_bytes, 0, 0},
      home_fast_(layout.kv_slot_bytes, options.segment_bytes, &fast_, options.fast_homes.value_or(options.fast)),
      home_host_(layout.kv_slot_bytes, options.segment_bytes, &host_, options.host_homes.value_or(options.host)),
      gradient_fast_(layout.gradient_slot_bytes, options.segment_bytes, &fast_, options.fast),
      gradient_host_(layout.gradient_slot_bytes, options.segment_bytes, &host_, options.host) {}

void* PageMemory::allocate(Arena& fast, Arena& host, const char* what) {
  if (void* slot = fast.allocate(); slot != nullptr) return slot;
  if (void* slot = host.allocate(); slot != nullptr) return slot;
  throw InputError(
      std::string("pages: no room for one more ") + what + " of " + std::to_string(fast.slot_bytes()) +
      " bytes: fast tier " + std::to_string(fast_.used_bytes) + " of " + std::to_string(fast_.limit_bytes) +
      " bytes, host tier " + std::to_string(host_.used_bytes) + " of " + std::to_string(host_.limit_bytes) +
      " bytes; raise pages.hbm_bytes or pages.host_bytes, shorten sequence.length, or bound the gradient slots with "
      "attention.chunk_pages");
}

void* PageMemory::allocate_home() { return allocate(home_fast_, home_host_, "page home"); }
void* PageMemory::allocate_gradient() { return allocate(gradient_fast_, gradient_host_, "page gradient"); }

void PageMemory::release_home(void* slot) { (home_fast_.owns(slot) ? home_fast_ : home_host_).release(slot); }
void PageMemory::release_gradient(void* slot) {
  (gradient_fast_.owns(slot) ? gradient_fast_ : gradient_host_).release(slot);
}

int64_t PageMemory::slots_in_use() const {
  return home_fast_.slots_in_use() + home_host_.slots_in_use() + gradient_fast_.slots_in_use() +
         gradient_host_.slots_in_use();
}

PageTable::PageTable(const PageLayout& layout, PageMemory* memory)
    : layout_(layout), memory_(memory), entries_(static_cast<size_t>(layout.num_layers * layout.num_pages)) {}

PageTable::~PageTable() {
  for (int64_t layer = 0; layer < layout_.num_layers; ++layer) release(layer, 0, layout_.num_pages);
}

size_t PageTable::index(int64_t layer, int64_t page) const {
  if (layer < 0 || layer >= layout_.num_layers || page < 0 || page >= layout_.num_pages) {
    throw std::logic_error("PageTable: layer " + std::to_string(layer) + ", page " + std::to_string(page) +
                           " outside " + std::to_string(layout_.num_layers) + " x " +
                           std::to_string(layout_.num_pages));
  }
  return static_cast<size_t>(layer * layout_.num_pages + page);
}

std::vector<void*> PageTable::make_homes(int64_t layer, int64_t first, int64_t count) {
  std::vector<void*> slots;
  slots.reserve(static_cast<size_t>(count));
  for (int64_t page = first; page < first + count; ++page) {
    Entry& entry = entries_[index(layer, page)];
    if (entry.home == nullptr) {
      entry.home = memory_->allocate_home();
      ++homes_in_use_;
    }
    slots.push_back(entry.home);
  }
  return slots;
}

void* PageTable::home(int64_t layer, int64_t page) const {
  void* slot = entries_[index(layer, page)].home;
  if (slot == nullptr) {
    throw std::logic_error("PageTable: layer " + std::to_string(layer) + ", page " + std::to_string(page) +
                           " has no home");
  }
  return slot;
}

void* PageTable::gradient(int64_t layer, int64_t page) const { return entries_[index(layer, page)].gradient; }

void* PageTable::gradient_for_adding(int64_t layer, int64_t page, bool* first) {
  Entry& entry = entries_[index(layer, page)];
  *first = entry.gradient == nullptr;
  if (*first) {
    entry.gradient = memory_->allocate_gradient();
    ++gradients_in_use_;
  }
  return entry.gradient;
}

void PageTable::release(int64_t layer, int64_t first, int64_t count) {
  for (int64_t page = first; page < first + count; ++page) {
    Entry& entry = entries_[index(layer, page)];
    if (entry.home != nullptr) {
      memory_->release_home(entry.home);
      --homes_in_use_;
    }
    if (entry.gradient != nullptr) {
      memory_->release_gradient(entry.gradient);
      --gradients_in_use_;
    }
    entry = {};
  }
}

}  // namespace oomb::pages
