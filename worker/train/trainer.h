// One worker's training state and what the coordinator can ask of it: a step, a checkpoint, an evaluation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "worker/checkpoint/store.h"
#include "worker/data/sequences.h"
#include "worker/model/parameters.h"
#include "worker/optim/optimizer.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb {

struct StepReport {
  int64_t step = 0;
  double loss = 0;     ///< mean over the step's valid labels
  int64_t tokens = 0;  ///< of the step's sequences
  int64_t labels = 0;  ///< valid ones; 0: the step was skipped and parameters are untouched
  double seconds = 0, pass1_seconds = 0, pass2_seconds = 0, optimizer_seconds = 0;
  double gradient_norm = 0, learning_rate = 0;
  int64_t hbm_peak_bytes = 0, host_peak_bytes = 0;
  int64_t page_fast_bytes = 0, page_host_bytes = 0;  ///< peak of the page arenas by tier
};

struct EvalReport {
  double loss = 0;
  int64_t labels = 0;
};

/// Callbacks of a trainer; both may be empty.
struct TrainerEvents {
  std::function<void(const std::string& level, const std::string& text)> log;
  std::function<void(const std::string& phase)> phase;
};

/// Not thread-safe. All members throw InputError for what a user can do something about; after a throw from run_step
/// the parameters are those of the step before.
class Trainer {
 public:
  enum class Mode : uint8_t { train, evaluate };

  /// Reads the model, opens the data, and goes on from a checkpoint as the config says.
  Trainer(const RunConfig& config, Mode mode, TrainerEvents events);

  /// Step `step` (from 1) must be the one after steps_done().
  StepReport run_step(int64_t step);
  /// Saves the state after steps_done().
  checkpoint::CheckpointInfo save_checkpoint();
  /// Mean loss over held-out sequences.
  EvalReport evaluate();

  int64_t steps_done() const { return steps_done_; }
  /// The checkpoint gone on from, or "".
  const std::string& resumed_from() const { return resumed_from_; }
  const model::Parameters& parameters() const { return *parameters_; }
  const TensorTypes& types() const { return types_; }
  /// What was decided at start, a line each.
  const std::vector<std::string>& summary() const { return summary_; }

 private:
  void load_model();
  void open_data();
  void make_pipeline();
  void resume();
  void load_trainer_state(const std::string& folder);
  std::vector<int64_t> labels_of(const std::vector<int64_t>& ids) const;
  void log(const std::string& level, const std::string& text) const;
  void phase(const std::string& text) const;

  RunConfig config_;
  Mode mode_;
  TrainerEvents events_;
  TensorTypes types_;
  OptimizerOptions optimizer_;
  std::unique_ptr<data::SequenceSource> training_, held_out_;
  std::unique_ptr<model::Parameters> parameters_;
  std::unique_ptr<pages::PageMemory> memory_;
  std::unique_ptr<SequencePipeline> pipeline_;
  std::unique_ptr<checkpoint::CheckpointStore> store_;
  int64_t steps_done_ = 0;
  std::string resumed_from_;
  std::vector<std::string> summary_;
};

}  // namespace oomb
