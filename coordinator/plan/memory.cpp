#include "coordinator/plan/memory.h"

#include <algorithm>

#include "coordinator/status/reporter.h"
#include "worker/sizes/model_sizes.h"
#include "worker/sizes/page_demand.h"

namespace oomb::plan {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;
// The worker's own parts of memory: program, libraries, CUDA's host side; and the share of a host that pages may take.
constexpr std::int64_t kGpuProcess = 3 * kGiB, kCpuProcess = kGiB / 2;
constexpr std::int64_t kHostPagesTenths = 8;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

class Planner {
 public:
  Planner(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware, const Layout& layout)
      : config_(config),
        model_(model),
        hardware_(hardware),
        layout_(layout),
        grid_{config.sequence.length, config.sequence.chunk, config.attention.page_tokens},
        fast_(hardware.gpu ? Tier::kHbm : Tier::kHost) {}

  MemoryPlan plan() {
    const std::int64_t on_node = std::min(hardware_.workers_per_node, layout_.workers);
    out_.hbm_capacity = hardware_.gpu_bytes;
    out_.host_capacity = hardware_.host_bytes / on_node;
    in_flight_ = std::min(config_.pipeline.sequences_in_flight, layout_.sequences_per_group);
    add_state();
    add_selection();
    add_work();
    add_pages_and_activations();
    add_disk();
    judge();
    return std::move(out_);
  }

 private:
  void add(Tier tier, Purpose purpose, std::string name, std::int64_t bytes, std::string how) {
    if (bytes > 0) out_.items.push_back({tier, purpose, std::move(name), bytes, std::move(how)});
  }

  void add_state() {
    const sizes::StateBytes state = sizes::state_bytes(model_, config_, layout_.workers);
    const std::string shards = layout_.workers == 1 ? "" : ", a shard of 1/" + std::to_string(layout_.workers);
    add(fast_, Purpose::kWeights, "weights", state.weights,
        std::to_string(num_parameters(model_)) + " parameters in " +
            std::string(to_string(config_.train.compute_dtype)));
    add(fast_, Purpose::kGradients, "weight gradients", state.gradients, "summed in fp32 or wider");
    add(fast_, Purpose::kOptimizer, "master weights", state.masters, "fp32" + shards);
    add(fast_, Purpose::kOptimizer, "moments", state.moments,
        "two, " + std::string(to_string(config_.train.optimizer_state)) + shards);
  }

  void add_selection() {
    const sizes::PageBytes page = sizes::page_bytes(model_, config_);
    if (sizes::may_select(config_, grid_)) {
      add(fast_, Purpose::kPages, "page means", in_flight_ * model_.num_layers * grid_.num_pages() * page.mean,
          std::to_string(grid_.num_pages()) + " pages x " + std::to_string(model_.num_layers) + " layers");
    }
    const std::int64_t chunks = ceil_div(grid_.num_chunks(), layout_.group_workers);
    add(Tier::kHost, Purpose::kStaging, "selections",
        in_flight_ * chunks * model_.num_layers * sizes::selection_bytes(config_),
        std::to_string(chunks) + " chunks x " + std::to_string(model_.num_layers) + " layers");
  }

  void add_work() {
    const sizes::WorkingBytes work = sizes::working_bytes(model_, config_, hardware_.gpu);
    add(fast_, Purpose::kStaging, "temporaries of a layer", work.layer, "twice what it could keep");
    add(fast_, Purpose::kStaging, "logits tile", work.logits, "3 x loss.row_tile rows, fp32");
    add(fast_, Purpose::kStaging, "gathered pages", work.gathered,
        "keys, values and their gradients of a block of tiles");
    add(fast_, Purpose::kStaging, "slack", work.slack, "assumed");
    add(Tier::kHost, Purpose::kStaging, "process", hardware_.gpu ? kGpuProcess : kCpuProcess, "assumed");
    if (layout_.group_workers == 1) return;
    const sizes::PageBytes page = sizes::page_bytes(model_, config_);
    const std::int64_t pages = sizes::most_union(config_, grid_.first_page_of(grid_.num_chunks() - 1));
    const auto one = static_cast<std::int64_t>(
        sizes::expected_union(config_, static_cast<double>(grid_.first_page_of(grid_.num_chunks() - 1))));
    add(fast_, Purpose::kStaging, "pages of other workers", 2 * std::min(one, pages) * page.home,
        "two layers' expected union of one chunk");
    add(fast_, Purpose::kStaging, "contributions", 2 * std::min(one, pages) * page.gradient,
        "two layers' expected union of one chunk");
  }

  std::int64_t free_bytes(Tier tier) const {
    return (tier == Tier::kHbm ? out_.hbm_capacity : out_.host_capacity) - out_.total(tier);
  }

  std::int64_t activation(Activations level) const { return sizes::activation_bytes(model_, config_, level); }

  // The most that one chunk can keep within `bytes`.
  Activations fitting_level(std::int64_t bytes) const {
    if (config_.pipeline.activations != Activations::kAuto) return config_.pipeline.activations;
    for (const Activations level : {Activations::kAll, Activations::kNoNorms, Activations::kAttention}) {
      if (activation(level) <= bytes) return level;
    }
    return Activations::kInput;
  }

  void add_pages_and_activations() {
    const sizes::PageBytes page = sizes::page_bytes(model_, config_);
    const sizes::PageDemand demand = sizes::page_demand(config_, grid_, model_.num_layers, layout_.group_workers, page);
    const std::int64_t expected = in_flight_ * demand.bytes_expected, most = in_flight_ * demand.bytes_most;
    const std::int64_t homes = std::min(in_flight_ * demand.home_slots * page.home, expected);
    out_.page_bytes_expected = expected;
    out_.page_bytes_most = most;

    // The worker leaves a quarter of what is there to the activations of the chunk at work, then serves pages.
    const std::int64_t room = free_bytes(fast_);
    std::int64_t fast_pages = 0;
    if (hardware_.gpu) {
      const std::int64_t first = activation(fitting_level(room / 4));
      fast_pages =
          config_.pages.hbm_bytes.automatic ? std::max<std::int64_t>(room - first, 0) : config_.pages.hbm_bytes.bytes;
    }
    const std::int64_t homes_fast = std::min(homes, fast_pages);
    const std::int64_t gradients_fast = std::min(expected - homes, fast_pages - homes_fast);
    out_.homes_in_hbm = homes > 0 ? static_cast<double>(homes_fast) / static_cast<double>(homes) : 1;
    out_.gradients_in_hbm =
        expected > homes ? static_cast<double>(gradients_fast) / static_cast<double>(expected - homes) : 1;
    const std::string how = config_.attention.kind == AttentionKind::kDense ? "all" : "expected at the peak";
    add(Tier::kHbm, Purpose::kPages, "K/V homes", homes_fast, "");
    add(Tier::kHbm, Purpose::kPages, "gradient slots", gradients_fast, how);
    add(Tier::kHost, Purpose::kPages, "K/V homes", homes - homes_fast, "");
    add(Tier::kHost, Purpose::kPages, "gradient slots", expected - homes - gradients_fast, how);
    host_pages_ = expected - homes_fast - gradients_fast;
    host_pages_most_ = host_pages_ + std::max<std::int64_t>(most - std::max(expected, fast_pages), 0);

    // A CPU worker leaves half of the rest to others.
    const std::int64_t left = hardware_.gpu ? room - std::min(fast_pages, most) : free_bytes(Tier::kHost) / 2;
    const ByteSize& asked = config_.pipeline.activation_bytes;
    add_activations(std::max<std::int64_t>(asked.automatic ? left : std::min(asked.bytes, left), 0));
    if (hardware_.gpu && out_.level != Activations::kInput) {
      const std::int64_t spare = pages_room() - std::max<std::int64_t>(most - fast_pages, 0);
      add_host_activations(std::min(spare, free_bytes(Tier::kHost)));
    }
  }

  std::int64_t own_chunks() const { return ceil_div(grid_.num_chunks(), layout_.group_workers); }

  // Host memory that pages may take.
  std::int64_t pages_room() const {
    const ByteSize& asked = config_.pages.host_bytes;
    return asked.automatic ? out_.host_capacity / 10 * kHostPagesTenths : asked.bytes;
  }

  void add_host_activations(std::int64_t spare) {
    const ByteSize& asked = config_.pipeline.activation_host_bytes;
    const std::int64_t bytes = asked.automatic ? spare : std::min(asked.bytes, spare);
    const std::int64_t one = sizes::host_activation_bytes(model_, config_);
    out_.host_chunks = std::clamp<std::int64_t>(bytes / one, 0, own_chunks() - out_.kept_chunks);
    add(Tier::kHost, Purpose::kActivations, "activations", out_.host_chunks * one,
        std::to_string(out_.host_chunks) + " more chunks' attention outputs");
  }

  // Attention outputs first, for as many chunks as possible: they save most work per byte. Then whole chunks.
  void add_activations(std::int64_t bytes) {
    out_.level = fitting_level(bytes);
    const std::int64_t whole = activation(out_.level), part = activation(std::max(out_.level, Activations::kAttention));
    const std::int64_t asked = config_.pipeline.kept_chunks;
    out_.kept_chunks = std::clamp<std::int64_t>(asked > 0 ? asked : bytes / part, 1, own_chunks());
    const std::int64_t rest = std::max<std::int64_t>(bytes - out_.kept_chunks * part, 0);
    out_.whole_chunks = whole > part ? std::min(rest / (whole - part), out_.kept_chunks) : out_.kept_chunks;
    // A chunk that is computed again keeps its level only when those kept from pass 1 are done with.
    const std::int64_t kept = out_.kept_chunks * part + out_.whole_chunks * std::max<std::int64_t>(whole - part, 0);
    add(fast_, Purpose::kActivations, "activations", std::max(kept, whole),
        std::to_string(out_.kept_chunks) + " of " + std::to_string(own_chunks()) + " chunks kept, " +
            std::to_string(out_.whole_chunks) + " with " + std::string(to_string(out_.level)));
  }

  void add_disk() {
    const sizes::StateBytes state = sizes::state_bytes(model_, config_, 1);
    const std::int64_t one = state.weights + state.masters + state.moments;
    const std::string copies = std::to_string(config_.checkpoint.keep) + " kept and one being written";
    add(Tier::kDisk, Purpose::kWeights, "weights in checkpoints", (config_.checkpoint.keep + 1) * state.weights,
        copies);
    add(Tier::kDisk, Purpose::kOptimizer, "optimizer in checkpoints",
        (config_.checkpoint.keep + 1) * (one - state.weights), copies);
  }

  void require(std::int64_t needed, std::int64_t there, const std::string& what) {
    if (needed <= there) return;
    out_.problems.push_back(what + " needs " + status::format_bytes(needed) + ", " + status::format_bytes(there) +
                            " are there");
  }

  void judge() {
    if (hardware_.gpu) require(out_.total(Tier::kHbm), out_.hbm_capacity, "HBM of a GPU");
    require(host_pages_, pages_room(), "host memory for a worker's pages");
    require(out_.total(Tier::kHost), out_.host_capacity, "host memory of a worker");
    if (hardware_.disk_bytes >= 0) require(out_.total(Tier::kDisk), hardware_.disk_bytes, "disk for checkpoints");
    out_.fits_at_most = out_.fits() && host_pages_most_ <= pages_room() &&
                        out_.total(Tier::kHost) - host_pages_ + host_pages_most_ <= out_.host_capacity;
  }

  const RunConfig& config_;
  const model::ModelConfig& model_;
  const Hardware& hardware_;
  const Layout& layout_;
  ChunkGrid grid_;
  Tier fast_;
  std::int64_t in_flight_ = 1, host_pages_ = 0, host_pages_most_ = 0;
  MemoryPlan out_;
};

}  // namespace

const char* to_string(Tier tier) {
  switch (tier) {
    case Tier::kHbm:
      return "hbm";
    case Tier::kHost:
      return "host";
    case Tier::kDisk:
      return "disk";
  }
  return "?";
}

const char* to_string(Purpose purpose) {
  switch (purpose) {
    case Purpose::kWeights:
      return "weights";
    case Purpose::kGradients:
      return "gradients";
    case Purpose::kOptimizer:
      return "optimizer";
    case Purpose::kActivations:
      return "activations";
    case Purpose::kPages:
      return "pages";
    case Purpose::kStaging:
      return "staging";
  }
  return "?";
}

std::int64_t MemoryPlan::total(Tier tier) const {
  std::int64_t sum = 0;
  for (const MemoryItem& item : items) sum += item.tier == tier ? item.bytes : 0;
  return sum;
}

std::int64_t MemoryPlan::total(Tier tier, Purpose purpose) const {
  std::int64_t sum = 0;
  for (const MemoryItem& item : items) sum += item.tier == tier && item.purpose == purpose ? item.bytes : 0;
  return sum;
}

MemoryPlan plan_memory(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
                       const Layout& layout) {
  return Planner(config, model, hardware, layout).plan();
}

}  // namespace oomb::plan
