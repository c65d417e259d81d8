// What all measurements of one session share.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "configs/run_config.h"
#include "worker/bench/ceilings.h"
#include "worker/bench/timer.h"
#include "worker/model/hf_config.h"
#include "worker/pipeline/sequence_pipeline.h"
#include "worker/train/trainer.h"

namespace oomb::bench {

struct Workbench {
  const RunConfig& config;
  const TrainerEvents& events;
  model::ModelConfig model;
  PipelineOptions options;
  TensorTypes types;
  Timer timer;
  Ceilings ceilings;
  std::optional<double> stated_peak;  ///< FLOP/s

  /// One request.
  Repeats repeats;
  int64_t length = 0;  ///< N

  void phase(const std::string& text) const {
    if (events.phase) events.phase(text);
  }
  /// Tokens of a full chunk of this sequence.
  int64_t chunk_tokens() const { return std::min(options.chunk_tokens, length); }
  /// Full pages before the sequence's last chunk.
  int64_t past_pages() const {
    const ChunkGrid grid{length, options.chunk_tokens, options.selection.page_tokens};
    return grid.first_page_of(grid.num_chunks() - 1);
  }
};

/// What a call does at least; 0: not counted.
struct Work {
  double bytes = 0, flops = 0;
};

/// Times `call` and makes its row (bench_server.h). The share is that of the copy ceiling for bytes, of the product
/// ceiling for flops.
nlohmann::json timed_row(const Workbench& bench, const std::string& op, const std::string& shape, const Work& work,
                         const std::function<void()>& call);

/// "4096 x 3584"
std::string shape_text(std::initializer_list<int64_t> sizes);

}  // namespace oomb::bench
