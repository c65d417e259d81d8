// One layer's past pages and one chunk's projections with random values, as attention and selection meet them.
#pragma once

#include "worker/attention/chunk_attention.h"
#include "worker/bench/workbench.h"
#include "worker/pages/page_table.h"

namespace oomb::bench {

/// Pages hold random K and V, all in the fast tier, or in host memory on a CPU.
class ChunkRig {
 public:
  /// `with_pages`: false leaves the pages themselves out, for a selection that reads only their means.
  ChunkRig(const Workbench& bench, bool with_pages);

  int64_t tokens() const { return qkv.q.size(1); }
  int64_t num_past_pages() const { return past_pages_; }
  attention::PastPages past(const attention::Selection& selection);

  attention::ChunkQkv qkv;
  attention::SelectionInputs inputs;  ///< over all past pages, without key bias
  at::Tensor chunk_positions;         ///< int64 [C]

 private:
  void write_past(const Workbench& bench);

  kernels::PageShape shape_;
  at::ScalarType gradient_dtype_;
  int64_t past_pages_;
  at::Tensor home_addresses_;
  std::unique_ptr<pages::PageMemory> memory_;
  std::unique_ptr<pages::PageTable> table_;
  cluster::LocalPages source_;
};

}  // namespace oomb::bench
