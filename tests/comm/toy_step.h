// A training step without a model: the whole page exchange of one worker with numbers that are known in advance.
//
// Pages hold a value of (step, sequence, layer, page); chunks "select" past pages by a hash; gradients are fractions
// whose sums depend on their order. A worker checks all that it reads and the exact bits of every sum. Runs over any
// transport.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "comm/exchange/keys.h"
#include "comm/exchange/transport.h"

namespace oomb::comm::test {

struct ToyOptions {
  std::int64_t num_layers = 3;
  std::int64_t num_pages = 29;
  std::int64_t pages_per_chunk = 3;
  std::int64_t page_values = 13;  ///< doubles of a page; its bytes are 8 times that
  int num_steps = 1;
  int sequences_per_step = 2;
  std::uint64_t seed = 1;
  int select_per_cent = 40;  ///< share of past pages a chunk reads
  bool any_order = false;    ///< contributions as they come; the gradients are then whole numbers
  double deadline_seconds = 60;
};

struct ToyResult {
  std::int64_t pages_read = 0;         ///< gets of pages
  std::int64_t pages_contributed = 0;  ///< staged and announced
  std::int64_t notes = 0;
  std::int64_t duplicates = 0, stale = 0;
};

/// One worker's part. Throws what the exchange throws, and std::runtime_error for a wrong value. Memory that peers
/// read or gets write to stays in `*memory`, which must live as long as the transport.
using ToyMemory = std::deque<std::vector<double>>;
ToyResult run_toy_steps(Transport& transport, const ToyOptions& options, ToyMemory* memory);

}  // namespace oomb::comm::test
