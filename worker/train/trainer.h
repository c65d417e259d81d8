// One worker's training state and what the coordinator can ask of it: a step, a checkpoint, an evaluation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "worker/checkpoint/store.h"
#include "worker/cluster/exchanged_pages.h"
#include "worker/cluster/segment_registry.h"
#include "worker/cluster/worker_group.h"
#include "worker/data/sequences.h"
#include "worker/model/parameters.h"
#include "worker/optim/optimizer.h"
#include "worker/optim/shards.h"
#include "worker/pipeline/sequence_pipeline.h"
#include "worker/tensor/pinned_memory.h"

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
  double compute_seconds = 0;                        ///< without waiting for other workers' pages and gradients
  /// With several workers: what this one moved, and what it would receive in ring attention (exchange_counts.h).
  std::optional<cluster::ExchangeLedger> exchange;
  double ring_bytes = 0;
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

/// In a group of several workers every member that throws comm errors or speaks of all workers is collective: each
/// worker calls it with the same arguments, and what it reports is the group's.
/// Not thread-safe. All members throw InputError for what a user can do something about; after a throw from run_step
/// the parameters are those of the step before.
class Trainer {
 public:
  /// measure: trains, but reads and writes no checkpoint, takes random ids where the data cannot give a sequence, and
  /// waits for the device between the parts of a step so that each is timed by itself.
  enum class Mode : uint8_t { train, evaluate, measure };

  /// Reads the model, opens the data, and goes on from a checkpoint as the config says. `group`: null for one worker.
  Trainer(const RunConfig& config, Mode mode, TrainerEvents events,
          std::unique_ptr<cluster::WorkerGroup> group = nullptr);

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
  /// This worker gives up: every wait for others ends, so that destruction does not wait either. Not collective.
  void abandon(const std::string& reason) { group_->abort(reason); }

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
  void join_group(const PipelineOptions& options, const cluster::TransferSlots& slots,
                  pages::PageMemory::Options memory);
  bool is_first() const { return group_->rank == 0; }
  double sum_over_workers(double own) const { return shards_ ? shards_->sum(own) : own; }
  void resume();
  checkpoint::CheckpointInfo write_checkpoint();
  void check_same_everywhere(const std::string& path) const;
  void add_exchange(StepReport& report) const;
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
  // Memory that others read or that gets write to goes after the connections do.
  std::unique_ptr<PinnedBlock> transfer_memory_;
  std::unique_ptr<cluster::SegmentRegistry> home_segments_;
  std::unique_ptr<pages::PageMemory> memory_;
  std::unique_ptr<cluster::WorkerGroup> group_;
  std::unique_ptr<ParameterShards> shards_;         // null for one worker
  std::unique_ptr<cluster::ExchangedPages> pages_;  // null for one worker
  std::unique_ptr<SequencePipeline> pipeline_;
  std::unique_ptr<checkpoint::CheckpointStore> store_;
  bool random_ids_ = false;
  bool failed_together_ = false;  ///< the last run_step failed on all workers at the same place
  int64_t steps_done_ = 0;
  int64_t saved_step_ = 0;  ///< of the newest checkpoint that holds this state, 0: none
  std::string resumed_from_;
  std::vector<std::string> summary_;
};

}  // namespace oomb
