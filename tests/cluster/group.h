// A group of workers as threads of one process, each with parameters, page memory and pipeline of its own, over the
// in-memory network; and the same sequence on one worker to compare with.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/exchange/twin_network.h"
#include "tests/worker/oracle.h"
#include "worker/cluster/exchange_counts.h"

namespace oomb::test {

/// Of one (chunk, layer): all tiles' pages in order; a single -1 when all past pages are taken.
using ChosenPages = std::vector<int64_t>;

struct GroupOptions {
  comm::TwinOptions network;               ///< network.num_workers is the group's size
  int64_t cache_bytes = int64_t{1} << 30;  ///< at least two pages are kept whatever this says
  int64_t num_sequences = 1;               ///< the same sequence several times, gradients summed
  int64_t step = 0;                        ///< moves the owner of the first chunk
  double wait_seconds = 60;                ///< of each wait for others: a deadlock fails the test
  bool evaluate = false;                   ///< loss only
  int lose_rank = -1;                      ///< this worker dies ...
  int64_t lose_after = 0;                  ///< ... after so many deliveries from or to it
};

struct GroupResult {
  double loss_sum = 0;
  int64_t num_labels = 0;
  std::map<std::string, at::Tensor> grads;  ///< summed over workers
  std::map<std::pair<int64_t, int64_t>, ChosenPages> selections;
  std::vector<std::map<std::string, at::Tensor>> grads_of_rank;
  std::vector<cluster::ExchangeLedger> ledgers;  ///< by rank
  std::vector<std::string> errors;  ///< what workers threw, reads of what must not be read, pages left over
};

/// Page memory of each worker is exactly what its own chunks need: more is an error.
GroupResult run_group(const model::ModelConfig& config, const PipelineOptions& options, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& labels, const GroupOptions& group);
GroupResult run_alone(const model::ModelConfig& config, const PipelineOptions& options, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& labels, bool evaluate = false);

/// Same loss, same selections, and for every tensor |a - b| <= 1e-9 max(|b|, 1e-6 |all|). Returns the worst of the
/// latter, and fails the running test for each difference and error.
double expect_same(const GroupResult& group, const GroupResult& alone, const std::string& what,
                   int64_t num_sequences = 1);

PipelineOptions dense_options(int64_t chunk, int64_t page, int64_t tile);
PipelineOptions topk_options(int64_t chunk, int64_t page, int64_t tile, int64_t budget, int64_t chunk_pages = 0);

}  // namespace oomb::test
