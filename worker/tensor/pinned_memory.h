// Large blocks of pinned host memory.
//
// LibTorch's pinned allocator rounds up to powers of two and populates on one thread; blocks of many GiB want neither.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

namespace oomb {

/// A range of host memory that copy engines can reach. Unpinned and unmapped when destroyed; no copy may be under way.
class PinnedBlock {
 public:
  /// Populates with several threads, then pins for `device`; on a CPU worker it is plain memory. Null when the machine,
  /// its control group or the memory-lock limit has no room.
  static std::unique_ptr<PinnedBlock> allocate(int64_t bytes, const at::Device& device);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  int64_t bytes() const { return bytes_; }
  /// A tensor over [offset, offset + its size): a view that must not outlive the block. `offset` is a multiple of the
  /// element size.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes, at::ScalarType type) const;

 private:
  PinnedBlock(void* memory, int64_t bytes, bool registered) : memory_(memory), bytes_(bytes), registered_(registered) {}

  void* memory_;
  int64_t bytes_;
  bool registered_;
};

}  // namespace oomb
