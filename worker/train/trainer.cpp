#include "worker/train/trainer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>

#include "configs/error.h"
#include "configs/this_machine.h"
#include "worker/checkpoint/crc32c.h"
#include "worker/data/token_stream.h"
#include "worker/model/hf_folder.h"
#include "worker/tensor/trace.h"
#include "worker/train/device_memory.h"
#include "worker/train/page_budget.h"
#include "worker/train/run_options.h"
#include "worker/train/step_profile.h"

namespace oomb {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr const char* kStateFile = "trainer.json";

model::StateFormat state_format(const TrainSection& t) {
  return {t.optimizer_state == OptimizerState::kInt8, t.master_weights == MasterWeights::kStochasticRounding};
}

// As the checkpoint records it: `auto` is what it stands for.
std::string_view master_weights_text(const TrainSection& t) {
  return to_string(t.master_weights == MasterWeights::kAuto ? MasterWeights::kFp32 : t.master_weights);
}

OptimizerOptions optimizer_options(const TrainSection& t) {
  OptimizerOptions o;
  o.learning_rate = t.learning_rate;
  o.min_learning_rate_ratio = t.min_learning_rate_ratio;
  o.warmup_steps = t.warmup_steps;
  o.total_steps = t.steps;
  o.weight_decay = t.weight_decay;
  o.beta1 = t.beta1;
  o.beta2 = t.beta2;
  o.epsilon = t.epsilon;
  o.clip_norm = t.clip_norm;
  o.rounding_seed = static_cast<uint64_t>(t.seed);
  return o;
}

std::vector<std::string> strings_of(const std::vector<std::filesystem::path>& paths) {
  std::vector<std::string> out;
  for (const auto& path : paths) out.push_back(path.string());
  return out;
}

}  // namespace

Trainer::Trainer(const RunConfig& config, Mode mode, TrainerEvents events, std::unique_ptr<cluster::WorkerGroup> group)
    : config_(config),
      mode_(mode),
      events_(std::move(events)),
      optimizer_(optimizer_options(config.train)),
      group_(group ? std::move(group) : std::make_unique<cluster::WorkerGroup>()) {
  types_ = types_of(config, group_->rank_here);
  initialise_device(types_.device);
  const int64_t threads =
      config.train.threads > 0 ? config.train.threads : std::max<int64_t>(available_cores() / group_->ranks_here, 1);
  at::set_num_threads(static_cast<int>(threads));
  if (config.train.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  store_ = std::make_unique<checkpoint::CheckpointStore>(
      checkpoint::StoreOptions{config.checkpoint.dir.string(),
                               config.checkpoint.keep,
                               [this](const std::string& text) { log("warning", text); },
                               {}});
  phase("reading the model");
  load_model();
  phase("opening the data");
  if (mode_ == Mode::measure) {
    open_data_or_random_ids();
    make_pipeline();
    return;
  }
  open_data();
  make_pipeline();
  phase("looking for a checkpoint");
  resume();
}

// All workers read the same settings and files: what one has to say is enough.
void Trainer::log(const std::string& level, const std::string& text) const {
  if (events_.log && is_first()) events_.log(level, text);
}
void Trainer::phase(const std::string& text) const {
  if (events_.phase) events_.phase(text);
}

void Trainer::load_model() {
  const bool from_folder = !config_.model.path.empty();
  const model::ModelConfig model =
      model::read_hf_config((from_folder ? config_.model.path : config_.model.config).string());
  parameters_ = std::make_unique<model::Parameters>(model, types_, trains(), state_format(config_.train));
  if (from_folder) {
    model::load_hf_weights(*parameters_, config_.model.path.string(),
                           [this](const std::string& text) { log("warning", text); });
  } else {
    const double std = config_.model.init_std > 0 ? config_.model.init_std : model.initializer_range;
    parameters_->initialise(static_cast<uint64_t>(config_.train.seed), std);
  }
  std::ostringstream line;
  line << "model: " << model.architecture << ", " << parameters_->num_elements() << " parameters, "
       << to_string(config_.train.compute_dtype) << " on " << types_.device.str() << ", " << at::get_num_threads()
       << " threads, " << (from_folder ? "weights from " + config_.model.path.string() : "random weights");
  summary_.push_back(line.str());
}

void Trainer::open_data() {
  const int64_t vocab = parameters_->config().vocab_size;
  const auto seed = static_cast<uint64_t>(config_.train.seed);
  if (config_.data.kind == DataKind::kCopy) {
    data::CopyTaskOptions o;
    o.sequence_length = config_.sequence.length;
    o.alphabet = config_.data.copy.alphabet;
    o.seed = seed;
    o.chunk_tokens = config_.sequence.chunk;
    if (o.alphabet > vocab) {
      throw InputError("data.copy.alphabet: " + std::to_string(o.alphabet) +
                       " symbols; allowed: at most the model's vocabulary of " + std::to_string(vocab));
    }
    training_ = data::make_copy_task(o);
    o.split = data::Split::kHeldOut;
    held_out_ = data::make_copy_task(o);
    return;
  }
  data::CorpusOptions o;
  o.paths = strings_of(config_.data.paths);
  o.extensions = config_.data.extensions;
  o.max_bytes = config_.data.max_bytes;
  o.vocab_size = vocab;
  o.format = config_.data.kind == DataKind::kText
                 ? data::TokenFormat::kText
                 : data::parse_token_format(std::string(to_string(config_.data.format)));
  if (config_.data.dtype != TokenDtype::kAuto) o.dtype = to_string(config_.data.dtype);
  const std::shared_ptr<const data::TokenStream> stream = data::open_corpus(o);
  if (stream->vocab_size_needed() > vocab) {
    throw InputError("data: token ids need a vocabulary of " + std::to_string(stream->vocab_size_needed()) +
                     ", the model has " + std::to_string(vocab) +
                     "; allowed: a model with a larger vocab_size, or other data");
  }
  data::WindowOptions w;
  w.sequence_length = config_.sequence.length;
  w.held_out_fraction = config_.data.holdout_fraction;
  w.seed = seed;
  w.shuffle = config_.data.shuffle;
  if (trains()) {
    training_ = data::make_windows(stream, w);
    summary_.push_back("data: " + std::to_string(stream->size()) + " tokens, " +
                       std::to_string(training_->num_sequences()) + " sequences of " +
                       std::to_string(w.sequence_length) + " per epoch");
  }
  if (mode_ == Mode::evaluate || config_.eval.every > 0) {
    w.split = data::Split::kHeldOut;
    held_out_ = data::make_windows(stream, w);
  }
}

void Trainer::open_data_or_random_ids() {
  try {
    open_data();
  } catch (const InputError& error) {
    training_ = data::make_random_ids(config_.sequence.length, parameters_->config().vocab_size,
                                      static_cast<uint64_t>(config_.train.seed));
    random_ids_ = true;
    summary_.push_back(std::string("data: random ids, since the run's own cannot be used: ") + error.what());
  }
}

void Trainer::make_pipeline() {
  PipelineOptions options = pipeline_options(config_, types_);
  WorkerShare share;
  share.workers = group_->size;
  share.workers_here = group_->ranks_here;
  share.reads_device = group_->transport && group_->transport->supports(comm::MemoryKind::kCuda);
  const PageBudget budget = plan_page_budget(config_, parameters_->config(), options, types_, trains(), share);
  options.activations = budget.activations;
  summary_.insert(summary_.end(), budget.lines.begin(), budget.lines.end());
  if (group_->size > 1) {
    join_group(options, budget.transfer, budget.memory);
  } else {
    memory_ = std::make_unique<pages::PageMemory>(
        SequencePipeline::page_layout(parameters_->config(), options, types_, config_.sequence.length), budget.memory);
  }
  pipeline_ = std::make_unique<SequencePipeline>(parameters_.get(), options, memory_.get(), pages_.get());
}

void Trainer::join_group(const PipelineOptions& options, const cluster::TransferSlots& slots,
                         pages::PageMemory::Options memory) {
  const model::ModelConfig& model = parameters_->config();
  cluster::ExchangedPages::Options exchange;
  exchange.layout = SequencePipeline::page_layout(model, options, types_, config_.sequence.length);
  exchange.shape = {model.num_kv_heads, options.selection.page_tokens, model.head_dim};
  exchange.gradient_dtype = options.gradient_dtype;
  exchange.types = types_;
  exchange.slots = slots;
  exchange.wait_seconds = config_.timeouts.step_seconds;  // lost peers are noticed far earlier
  const int64_t bytes = std::max<int64_t>(cluster::transfer_bytes(slots, exchange.layout), 1);
  transfer_memory_ = PinnedBlock::allocate(bytes, types_.device);
  if (!transfer_memory_) {
    throw InputError("pages.host_bytes: this machine has no " + std::to_string(bytes) +
                     " bytes for transfers between workers; lower pages.cache_bytes or set attention.chunk_pages");
  }
  home_segments_ =
      std::make_unique<cluster::SegmentRegistry>(group_->transport.get(), config_.timeouts.connect_seconds);
  const bool cuda = types_.device.is_cuda();
  memory.fast_homes = home_segments_->registered(memory.fast, cuda ? comm::MemoryKind::kCuda : comm::MemoryKind::kHost);
  memory.host_homes = home_segments_->registered(memory.host, comm::MemoryKind::kHost);
  memory_ = std::make_unique<pages::PageMemory>(exchange.layout, memory);
  pages_ = std::make_unique<cluster::ExchangedPages>(group_->transport.get(), home_segments_.get(),
                                                     transfer_memory_->view(0, {bytes}, at::kByte).data_ptr(),
                                                     comm::MemoryKind::kHost, exchange);
  comm::Collectives* collectives =
      group_->device_collectives ? group_->device_collectives.get() : group_->collectives.get();
  shards_ = std::make_unique<ParameterShards>(collectives, exchange.wait_seconds);
  summary_.push_back("workers: " + std::to_string(group_->size) + " share each sequence; pages over " +
                     group_->transport->description() + ", weight gradients over " + collectives->description());
}

void Trainer::resume() {
  std::string error;
  try {
    if (mode_ == Mode::train && is_first()) {
      store_->check_writable(0);
      store_->remove_leftovers();  // of a run that was killed while it saved; their room counts as free
      store_->check_writable(model::checkpoint_bytes(*parameters_));
    }
  } catch (const InputError& failure) {
    error = failure.what();
  }
  group_->agree(error, config_.timeouts.start_seconds);
  const Resume& from = config_.checkpoint.resume;
  std::optional<checkpoint::CheckpointInfo> found;
  switch (from.kind) {
    case Resume::Kind::kNever:
      break;
    case Resume::Kind::kAuto:
      found = store_->latest_whole();
      break;
    case Resume::Kind::kPath:
      found = checkpoint::resolve_resume(from.path.string(), [this](const std::string& text) { log("warning", text); });
      break;
  }
  check_same_everywhere(found ? found->path : "");
  if (mode_ == Mode::train && from.kind != Resume::Kind::kAuto) warn_of_later_checkpoints(found ? found->step : 0);
  if (!found) {
    if (mode_ == Mode::evaluate && config_.model.path.empty()) {
      throw InputError(config_.checkpoint.dir.string() +
                       ": no checkpoint to evaluate; train first, or name one in checkpoint.resume");
    }
    return;
  }
  load_trainer_state(found->path);  // first: it names the setting where a tensor would only not fit
  model::load_hf_weights(*parameters_, found->path, [this](const std::string& text) { log("warning", text); });
  if (mode_ == Mode::train) model::load_optimizer_state(*parameters_, found->path);
  resumed_from_ = found->path;
  saved_step_ = steps_done_;
  summary_.push_back("resumed after step " + std::to_string(steps_done_) + " from " + found->path);
}

// Every worker looks for itself, which goes wrong where the folder is not one that all machines share.
void Trainer::check_same_everywhere(const std::string& path) const {
  if (group_->size == 1) return;
  const std::vector<std::string> paths =
      group_->collectives->all_gather_bytes(path, comm::in_seconds(config_.timeouts.start_seconds));
  for (size_t rank = 1; rank < paths.size(); ++rank) {
    if (paths[rank] == paths[0]) continue;
    throw InputError(config_.checkpoint.dir.string() + ": worker 0 finds checkpoint \"" + paths[0] + "\", worker " +
                     std::to_string(rank) + " \"" + paths[rank] +
                     "\"; allowed: a checkpoint.dir on a file system that all machines share");
  }
}

void Trainer::warn_of_later_checkpoints(int64_t step) const {
  const std::vector<int64_t> steps = store_->steps();
  if (steps.empty() || steps.back() <= step) return;
  log("warning", config_.checkpoint.dir.string() + ": has checkpoints of an earlier run up to step " +
                     std::to_string(steps.back()) + ", and this run starts after step " + std::to_string(step) +
                     "; checkpoint.resume: auto will take the highest step, so remove those or choose another run.dir");
}

void Trainer::load_trainer_state(const std::string& folder) {
  const std::string file = folder + "/" + kStateFile;
  std::ifstream in(file);
  const nlohmann::json state = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!state.is_object() || !state.contains("step") || !state["step"].is_number_integer()) {
    throw InputError(file + ": not a trainer state; the checkpoint is damaged");
  }
  steps_done_ = state["step"].get<int64_t>();
  if (mode_ == Mode::evaluate) return;
  // The data position is a count of sequences, so it means the same sequences only if these agree; the optimizer's
  // state is read as it was written. Checkpoints that do not say its format are older than the choice.
  const auto must_agree = [&](const char* key, const char* field, const nlohmann::json& now,
                              const nlohmann::json& unless_written = {}) {
    const nlohmann::json then = state.value(key, unless_written);
    if (then != now) {
      throw InputError(file + ": " + field + " was " + then.dump() + " and is now " + now.dump() +
                       "; allowed: the value of the checkpoint, or start anew from its weights with model.path and "
                       "checkpoint.resume: never");
    }
  };
  must_agree("compute_dtype", "train.compute_dtype", to_string(config_.train.compute_dtype));
  must_agree("optimizer_state", "train.optimizer_state", to_string(config_.train.optimizer_state), "fp32");
  must_agree("master_weights", "train.master_weights", master_weights_text(config_.train), "fp32");
  must_agree("sequence_length", "sequence.length", config_.sequence.length);
  must_agree("sequences_per_step", "train.sequences_per_step", config_.train.sequences_per_step);
  must_agree("seed", "train.seed", config_.train.seed);
  must_agree("shuffle", "data.shuffle", config_.data.shuffle);
  must_agree("sequences_per_epoch", "the number of sequences in the data", training_->num_sequences());
}

std::vector<int64_t> Trainer::labels_of(const std::vector<int64_t>& ids) const {
  std::vector<int64_t> labels(ids.size());
  data::make_labels(ids, labels);
  if (config_.data.kind == DataKind::kCopy && !random_ids_) {
    // The first half is random: nothing to learn there, and it would hide the loss of the copy.
    const size_t half = (ids.size() + 1) / 2;
    std::fill(labels.begin(), labels.begin() + static_cast<std::ptrdiff_t>(half), data::kIgnoredLabel);
  }
  return labels;
}

StepReport Trainer::run_step(int64_t step) {
  if (step != steps_done_ + 1) {
    throw std::logic_error("step " + std::to_string(step) + " asked for after step " + std::to_string(steps_done_));
  }
  failed_together_ = false;
  if (step != config_.profile.step || !is_first()) return do_step(step);
  StepProfile profile(types_.device);
  StepReport report = do_step(step);
  const std::filesystem::path& named = config_.profile.file;
  const std::filesystem::path file =
      named.empty() ? config_.run.dir / ("trace-step-" + std::to_string(step) + ".json") : named;
  profile.save(file.string());
  log("info", "trace of step " + std::to_string(step) + " in " + file.string());
  return report;
}

StepReport Trainer::do_step(int64_t step) {
  const auto start = Clock::now();
  StepReport report;
  report.step = step;
  const int64_t count = config_.train.sequences_per_step;
  std::vector<std::vector<int64_t>> ids(static_cast<size_t>(count)), labels(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    auto& sequence = ids[static_cast<size_t>(i)];
    sequence.resize(static_cast<size_t>(config_.sequence.length));
    training_->get((step - 1) * count + i, sequence);
    labels[static_cast<size_t>(i)] = labels_of(sequence);
    report.tokens_crc32c = checkpoint::crc32c(std::as_bytes(std::span(sequence)), report.tokens_crc32c);
    report.labels += std::count_if(labels[static_cast<size_t>(i)].begin(), labels[static_cast<size_t>(i)].end(),
                                   [](int64_t label) { return label != data::kIgnoredLabel; });
    report.tokens += config_.sequence.length;
  }

  // One scale for the whole step: the loss is a mean over all its labels, not a mean of means.
  const double scale = report.labels > 0 ? 1.0 / static_cast<double>(report.labels) : 0.0;
  double loss_sum = 0, pass_start = seconds_since(start);
  const char* running = nullptr;
  PipelineObserver observer;
  observer.on_phase = [&](const char* pass, int64_t chunk) {
    if (running != pass) {
      part_ends();
      const double now = seconds_since(start);
      if (running != nullptr)
        (std::string_view(running) == "pass 1" ? report.pass1_seconds : report.pass2_seconds) += now - pass_start;
      running = pass;
      pass_start = now;
    }
    phase("step " + std::to_string(step) + ", " + pass + ", chunk " + std::to_string(chunk));
  };
  pipeline_->set_observer(observer);
  parameters_->zero_gradients();
  if (pages_) {
    pages_->begin_step(step);
    pages_->reset_ledger();
  }
  for (int64_t i = 0; i < count; ++i) {
    loss_sum += pipeline_->train(ids[static_cast<size_t>(i)], labels[static_cast<size_t>(i)], scale).loss_sum;
  }
  pipeline_->set_observer({});
  part_ends();
  if (running != nullptr)
    (std::string_view(running) == "pass 1" ? report.pass1_seconds : report.pass2_seconds) +=
        seconds_since(start) - pass_start;
  report.loss = sum_over_workers(loss_sum) * scale;
  if (report.labels > 0) {
    failed_together_ = true;  // from here on all workers see the same numbers
    if (!std::isfinite(report.loss)) {
      throw InputError("step " + std::to_string(step) + ": the loss is not finite; parameters are as after step " +
                       std::to_string(step - 1) + "; a lower train.learning_rate may help");
    }
    phase("step " + std::to_string(step) + ", optimizer");
    const auto optimizer_start = Clock::now();
    const TraceRange range("optimizer");
    const OptimizerReport optimizer = optimizer_step(*parameters_, optimizer_, step, shards_.get());
    synchronise(types_.device);  // a step's time is that of all its work
    report.optimizer_seconds = seconds_since(optimizer_start);
    report.gradient_norm = optimizer.gradient_norm;
    report.learning_rate = optimizer.learning_rate;
    failed_together_ = false;
  }
  steps_done_ = step;
  report.hbm_peak_bytes = peak_device_bytes(types_.device);
  report.host_peak_bytes = peak_host_bytes();
  report.page_fast_bytes = memory_->budget(pages::Tier::fast).peak_bytes;
  report.page_host_bytes = memory_->budget(pages::Tier::host).peak_bytes;
  report.seconds = seconds_since(start);
  report.compute_seconds = report.seconds;
  if (pages_) add_exchange(report);
  return report;
}

void Trainer::add_exchange(StepReport& report) const {
  const cluster::ExchangeCounts sum = pages_->ledger().total();
  report.compute_seconds -= sum.means_seconds + sum.page_seconds + sum.contribution_seconds;
  report.exchange = pages_->ledger();
  const model::ModelConfig& model = parameters_->config();
  const int64_t token_elements = 2 * model.num_kv_heads * model.head_dim;
  report.ring_bytes =
      static_cast<double>(config_.train.sequences_per_step) *
      cluster::ring_bytes(
          config_.sequence.length, model.num_layers, group_->size,
          token_elements * static_cast<int64_t>(c10::elementSize(types_.compute)),
          token_elements * static_cast<int64_t>(c10::elementSize(pipeline_options(config_, types_).gradient_dtype)));
}

void Trainer::part_ends() const {
  if (mode_ == Mode::measure) synchronise(types_.device);
}

void Trainer::check_finite() const {
  const std::string name = first_not_finite(*parameters_);
  std::string error;
  if (!name.empty()) {
    error = "step " + std::to_string(steps_done_) + ": " + name +
            " holds NaN or infinite values after the optimizer; no checkpoint is made of that and earlier ones stay; a "
            "lower train.learning_rate may help";
  }
  group_->agree(error, config_.timeouts.step_seconds);
}

std::string Trainer::keep_last_good_step() {
  const std::string step = "step " + std::to_string(steps_done_);
  if (steps_done_ == 0) return "no step was done";
  if (group_->size > 1 && !failed_together_) return "earlier checkpoints are whole";
  if (saved_step_ == steps_done_) return "the checkpoint of " + step + " is whole";
  try {
    check_finite();
    return step + " is saved in " + save_checkpoint().path;
  } catch (const InputError& error) {
    return std::string("they cannot be saved: ") + error.what();
  }
}

// The first worker writes; the others give it their shards of the optimizer's state and hear how it went.
checkpoint::CheckpointInfo Trainer::save_checkpoint() {
  phase("checkpoint of step " + std::to_string(steps_done_));
  if (shards_) shards_->gather_state(*parameters_);
  checkpoint::CheckpointInfo info;
  info.step = steps_done_;
  std::string error;
  try {
    if (is_first()) info = write_checkpoint();
  } catch (const InputError& failure) {
    error = failure.what();
  }
  group_->agree(error, config_.timeouts.step_seconds);
  saved_step_ = steps_done_;
  return info;
}

checkpoint::CheckpointInfo Trainer::write_checkpoint() {
  auto writer = store_->begin(steps_done_, model::checkpoint_bytes(*parameters_));
  model::save_hf_folder(*parameters_, *writer);
  model::save_optimizer_state(*parameters_, *writer);
  // Nothing of a step is drawn from a generator with state: the order of the data is a function of (seed, index), the
  // bits of stochastic rounding are one of (seed, step, parameter, element).
  const nlohmann::json state = {{"step", steps_done_},
                                {"next_sequence", steps_done_ * config_.train.sequences_per_step},
                                {"sequences_per_step", config_.train.sequences_per_step},
                                {"sequences_per_epoch", training_->num_sequences()},
                                {"sequence_length", config_.sequence.length},
                                {"compute_dtype", to_string(config_.train.compute_dtype)},
                                {"optimizer_state", to_string(config_.train.optimizer_state)},
                                {"master_weights", master_weights_text(config_.train)},
                                {"seed", config_.train.seed},
                                {"shuffle", config_.data.shuffle}};
  checkpoint::write_text(*writer, kStateFile, state.dump(2) + "\n");
  return writer->commit();
}

EvalReport Trainer::evaluate() {
  if (held_out_ == nullptr) throw std::logic_error("evaluate: no held-out data was opened");
  EvalReport report;
  const int64_t count = std::min(config_.eval.sequences, held_out_->num_sequences());
  double loss_sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    phase("evaluation, sequence " + std::to_string(i));
    std::vector<int64_t> ids(static_cast<size_t>(config_.sequence.length));
    held_out_->get(i, ids);
    const SequenceLoss loss = pipeline_->evaluate(ids, labels_of(ids));
    loss_sum += loss.loss_sum;
    report.labels += loss.num_labels;
  }
  loss_sum = sum_over_workers(loss_sum);
  report.labels = static_cast<int64_t>(std::llround(sum_over_workers(static_cast<double>(report.labels))));
  if (report.labels > 0) report.loss = loss_sum / static_cast<double>(report.labels);
  return report;
}

}  // namespace oomb
