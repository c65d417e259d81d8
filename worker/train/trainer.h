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
  double loss = 0;             ///< mean over the step's valid labels
  int64_t tokens = 0;          ///< of the step's sequences
  int64_t labels = 0;          ///< valid ones; 0: the step was skipped and parameters are untouched
  uint32_t tokens_crc32c = 0;  ///< of the step's ids as little-endian int64: tells whether two runs saw the same
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
  /// measure: trains, but reads and writes no checkpoint, takes random ids where the data cannot give a sequence, and
  /// waits for the device between the parts of a step so that each is timed by itself.
  enum class Mode : uint8_t { train, evaluate, measure };

  /// Reads the model, opens the data, and goes on from a checkpoint as the config says.
  Trainer(const RunConfig& config, Mode mode, TrainerEvents events);

  /// Step `step` (from 1) must be the one after steps_done().
  StepReport run_step(int64_t step);
  /// Throws InputError naming a parameter if the state after steps_done() holds NaN or infinite values: a checkpoint of
  /// it could not be read again, and would push a good one out.
  void check_finite() const;
  /// Saves the state after steps_done(). Throws InputError when it cannot be written; earlier checkpoints are whole
  /// then.
  checkpoint::CheckpointInfo save_checkpoint();
  /// After a step that failed: makes a checkpoint of steps_done() unless there is one. Says what became of it.
  std::string keep_last_good_step();
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
  bool trains() const { return mode_ != Mode::evaluate; }
  StepReport do_step(int64_t step);
  void part_ends() const;
  void load_model();
  void open_data();
  void open_data_or_random_ids();
  void make_pipeline();
  void resume();
  void warn_of_later_checkpoints(int64_t step) const;
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
  bool random_ids_ = false;
  int64_t steps_done_ = 0;
  int64_t saved_step_ = 0;  ///< of the newest checkpoint that holds this state, 0: none
  std::string resumed_from_;
  std::vector<std::string> summary_;
};

}  // namespace oomb
