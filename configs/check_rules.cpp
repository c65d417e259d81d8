#include "configs/check_rules.h"

#include <initializer_list>

#include "configs/document.h"

namespace oomb::schema {
namespace {

class Rules {
 public:
  Rules(const RunConfig& config, const Places& places) : config_(config), places_(places) {}

  void check_all() const {
    check_model_and_data();
    check_training();
    check_attention();
    check_pages();
    check_cluster();
  }

 private:
  // The error is placed at the first of the settings that somebody wrote; its path is the first one.
  void require(bool holds, std::initializer_list<const char*> fields, const std::string& problem) const {
    if (holds) return;
    std::string where = places_.document;
    for (const char* field : fields) {
      const auto written = places_.written.find(field);
      if (written == places_.written.end()) continue;
      where = written->second;
      break;
    }
    fail(where, *fields.begin(), problem);
  }

  static std::string text(std::int64_t number) { return std::to_string(number); }
  template <typename E>
  requires std::is_enum_v<E>
  static std::string text(E value) { return std::string(to_string(value)); }

  void check_model_and_data() const {
    const ModelSection& model = config_.model;
    const DataSection& data = config_.data;
    const EvalSection& eval = config_.eval;
    require(model.path.empty() || model.config.empty(), {"model.path", "model.config"},
            "given together with model.config; allowed: model.path (trained weights) or model.config (random weights)");
    require(!model.path.empty() || !model.config.empty(), {"model.config", "model.path"},
            "neither it nor model.path is given; allowed: a Hugging Face config.json in model.config, or a folder with "
            "weights in model.path");
    require(data.kind == DataKind::kCopy || !data.paths.empty(), {"data.paths", "data.kind"},
            "empty with data.kind " + text(data.kind) + "; allowed: at least one file, folder or glob");
    require(eval.every == 0 || data.kind == DataKind::kCopy || data.holdout_fraction > 0,
            {"data.holdout_fraction", "eval.every"},
            "0 leaves nothing for the evaluations of eval.every " + text(eval.every) + "; allowed: above 0");
  }

  void check_training() const {
    const TrainSection& train = config_.train;
    require(train.warmup_steps <= train.steps, {"train.warmup_steps", "train.steps"},
            text(train.warmup_steps) + " is above train.steps " + text(train.steps) + "; allowed: at most train.steps");
    require(train.master_weights != MasterWeights::kStochasticRounding || train.compute_dtype == ComputeDtype::kBf16,
            {"train.master_weights", "train.compute_dtype"},
            "stochastic_rounding is for train.compute_dtype bf16, not " + text(train.compute_dtype) +
                "; allowed: auto, fp32");
    require(train.optimizer_state != OptimizerState::kInt8 || train.compute_dtype != ComputeDtype::kFp64,
            {"train.optimizer_state", "train.compute_dtype"},
            "int8 is narrower than train.compute_dtype fp64 is for; allowed: fp32");
    require(config_.timeouts.heartbeat_seconds * 2 <= config_.timeouts.lost_seconds,
            {"timeouts.lost_seconds", "timeouts.heartbeat_seconds"},
            "less than two heartbeats of timeouts.heartbeat_seconds; allowed: at least twice that");
  }

  void check_attention() const {
    const AttentionSection& attention = config_.attention;
    const std::int64_t page = attention.page_tokens;
    const std::int64_t tile = attention.query_tile == 0 ? page : attention.query_tile;
    const std::int64_t chunk = config_.sequence.chunk;
    require(tile % page == 0, {"attention.query_tile", "attention.page_tokens"},
            text(tile) + " is no multiple of attention.page_tokens " + text(page) +
                "; allowed: a multiple of attention.page_tokens, or 0");
    if (attention.query_tile == 0) {
      require(chunk % tile == 0, {"sequence.chunk", "attention.page_tokens"},
              text(chunk) + " is no multiple of attention.page_tokens " + text(page) +
                  " (attention.query_tile is 0, so a tile is a page); allowed: a multiple of it");
    } else {
      require(chunk % tile == 0, {"sequence.chunk", "attention.query_tile"},
              text(chunk) + " is no multiple of attention.query_tile " + text(tile) + "; allowed: a multiple of it");
    }
    require(attention.chunk_pages == 0 || attention.chunk_pages >= attention.budget_pages,
            {"attention.chunk_pages", "attention.budget_pages"},
            text(attention.chunk_pages) + " is below attention.budget_pages " + text(attention.budget_pages) +
                "; allowed: 0, or at least attention.budget_pages");
    require(attention.chunk_pages == 0 || attention.votes != VoteSource::kPreviousTile,
            {"attention.votes", "attention.chunk_pages"},
            "previous_tile does not go with attention.chunk_pages " + text(attention.chunk_pages) +
                ", which lets a whole chunk vote; allowed: tile, or attention.chunk_pages 0");
  }

  void check_pages() const {
    const PagesSection& pages = config_.pages;
    require(pages.grad_dtype == PageGradDtype::kAuto || config_.train.compute_dtype != ComputeDtype::kFp64,
            {"pages.grad_dtype", "train.compute_dtype"},
            text(pages.grad_dtype) + " is narrower than train.compute_dtype fp64; allowed: auto");
  }

  void check_cluster() const {
    const TopologySection& topology = config_.topology;
    require(topology.workers > 1 || config_.exchange == Exchange::kAuto || config_.exchange == Exchange::kPages,
            {"exchange", "topology.workers"},
            text(config_.exchange) + " needs more than one worker and topology.workers is 1; allowed: auto, pages");
  }

  const RunConfig& config_;
  const Places& places_;
};

}  // namespace

void check_rules(const RunConfig& config, const Places& places) { Rules(config, places).check_all(); }

}  // namespace oomb::schema
