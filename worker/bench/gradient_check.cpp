#include "worker/bench/gradient_check.h"

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "worker/bench/page_room.h"
#include "worker/data/sequences.h"

namespace oomb::bench {

namespace {

constexpr uint64_t kSeed = 1;
constexpr double kInnerRoundings = 10;  // see rounding_bound

double unit_roundoff(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::ldexp(1.0, -53);
    case at::kFloat:
      return std::ldexp(1.0, -24);
    case at::kBFloat16:
      return std::ldexp(1.0, -8);
    default:
      throw std::logic_error("no unit roundoff for this type");
  }
}

// Two layers, the run's head size, group and kind of weights, and little else: the oracle runs on a CPU in double.
model::ModelConfig small_model(model::ModelConfig c) {
  const int64_t group = c.num_heads / c.num_kv_heads;
  c.num_layers = std::min<int64_t>(c.num_layers, 2);
  c.num_kv_heads = std::min<int64_t>(c.num_kv_heads, 2);
  c.num_heads = group * c.num_kv_heads;
  c.hidden_size = std::min<int64_t>(c.hidden_size, 256);
  c.intermediate_size = std::min<int64_t>(c.intermediate_size, 384);
  c.vocab_size = std::min<int64_t>(c.vocab_size, 509);
  return c;
}

// The run's pages, tiles and votes as far as a short sequence can have them: chunks of two tiles, and fewer pages to
// take than there are from the third chunk on.
PipelineOptions small_options(PipelineOptions o) {
  attention::SelectionRule& rule = o.selection;
  const int64_t tile_pages = rule.query_tile / rule.page_tokens;
  rule.page_tokens = std::min<int64_t>(rule.page_tokens, 128);
  rule.query_tile = rule.page_tokens * std::min<int64_t>(tile_pages, 2);
  o.chunk_tokens = 2 * rule.query_tile;
  rule.budget_pages = std::min<int64_t>(rule.budget_pages, 3);
  if (rule.chunk_pages > 0) rule.chunk_pages = rule.budget_pages + 1;
  rule.sink_pages = std::min<int64_t>(rule.sink_pages, 1);
  rule.recent_pages = std::min<int64_t>(rule.recent_pages, 1);
  o.loss_row_tile = std::min<int64_t>(o.loss_row_tile, 37);
  o.activations = {};
  return o;
}

// Norms away from 1 and biases away from 0, so that a dropped factor or term shows.
void randomise(model::Parameters& parameters) {
  parameters.initialise(kSeed, 0.8 / std::sqrt(static_cast<double>(parameters.config().hidden_size)));
  for (model::Parameter& p : parameters.all()) {
    if (p.init == model::InitKind::normal) continue;
    at::Tensor& target = p.master.defined() ? p.master : p.weight;
    target.add_(at::randn_like(target), 0.3);
  }
  parameters.refresh_weights();
}

struct Example {
  std::vector<int64_t> ids, labels;
};

double run(model::Parameters& parameters, const PipelineOptions& options, const Example& example,
           const PipelineObserver& observer) {
  const pages::PageLayout layout = SequencePipeline::page_layout(parameters.config(), options, parameters.types(),
                                                                 static_cast<int64_t>(example.ids.size()));
  pages::PageMemory memory(layout, page_room(layout, parameters.types().device, Placement::split));
  SequencePipeline pipeline(&parameters, options, &memory);
  pipeline.set_observer(observer);
  parameters.zero_gradients();
  return pipeline.train(example.ids, example.labels, 1.0).loss_sum;
}

}  // namespace

nlohmann::json GradientCheck::json() const {
  return {{"passed", passed()},
          {"worst_error", worst_error},
          {"tensor", tensor},
          {"loss_error", loss_error},
          {"bound", bound},
          {"tokens", tokens},
          {"layers", layers},
          {"chunk", chunk},
          {"budget_pages", budget_pages}};
}

double rounding_bound(const TensorTypes& types, at::ScalarType slot_type, int64_t layers, int64_t longest_sum) {
  const double u = std::max(unit_roundoff(types.compute), unit_roundoff(slot_type));
  const double u_acc = unit_roundoff(types.acc());
  const auto results = static_cast<double>(20 * layers + 6), terms = static_cast<double>(longest_sum);
  const double variance = results * (u * u + kInnerRoundings * u_acc * u_acc) + terms * u_acc * u_acc;
  return 3.0 * std::sqrt(variance / 3.0);
}

void compare_gradients(const model::Parameters& got, const model::Parameters& expected, GradientCheck& check) {
  double all = 0;
  for (const model::Parameter& p : expected.all()) all += p.grad.pow(2).sum().item<double>();
  all = std::sqrt(all);
  check.worst_error = -1;
  for (size_t i = 0; i < expected.all().size(); ++i) {
    const model::Parameter& wanted = expected.all()[i];
    const at::Tensor difference = got.all()[i].grad.cpu().to(at::kDouble) - wanted.grad;
    double error = difference.norm().item<double>() / std::max(wanted.grad.norm().item<double>(), 1e-3 * all);
    if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    if (error > check.worst_error) {
      check.worst_error = error;
      check.tensor = wanted.name;
    }
  }
}

GradientCheck check_gradients(const model::ModelConfig& run_config, const PipelineOptions& run_options,
                              const TensorTypes& types) {
  const model::ModelConfig config = small_model(run_config);
  PipelineOptions options = small_options(run_options);
  GradientCheck check;
  check.layers = config.num_layers;
  check.chunk = options.chunk_tokens;
  check.budget_pages = options.selection.dense ? -1 : options.selection.budget_pages;
  check.tokens = 3 * options.chunk_tokens + options.selection.page_tokens / 2 + 1;  // last chunk and page partly filled
  Example example{std::vector<int64_t>(static_cast<size_t>(check.tokens)), {}};
  data::make_random_ids(check.tokens, config.vocab_size, kSeed)->get(0, example.ids);
  example.labels.resize(example.ids.size());
  data::make_labels(example.ids, example.labels);

  model::Parameters got(config, types, /*training=*/true);
  randomise(got);
  std::map<std::pair<int64_t, int64_t>, attention::Selection> selections;
  PipelineObserver recorder;
  recorder.on_selection = [&](int64_t chunk, int64_t layer, const attention::Selection& chosen) {
    attention::Selection copy = chosen;
    if (!chosen.all_past) copy.pages = chosen.pages_on(at::kCPU).clone();
    copy.host.reset();
    selections[{chunk, layer}] = copy;
  };
  const double loss = run(got, options, example, recorder);

  const TensorTypes exact{at::kDouble, at::Device(at::kCPU)};
  model::Parameters expected(config, exact, /*training=*/true);
  for (size_t i = 0; i < got.all().size(); ++i) expected.all()[i].weight.copy_(got.all()[i].weight.cpu());
  PipelineOptions replay = options;
  replay.gradient_dtype = at::kDouble;
  replay.replay = [&](int64_t chunk, int64_t layer) { return selections.at({chunk, layer}); };
  const double exact_loss = run(expected, replay, example, {});

  compare_gradients(got, expected, check);
  check.loss_error = std::abs(loss - exact_loss) / exact_loss;
  if (!std::isfinite(check.loss_error)) check.loss_error = std::numeric_limits<double>::infinity();
  check.bound = rounding_bound(types, options.gradient_dtype, config.num_layers,
                               std::max({check.tokens, config.vocab_size, config.intermediate_size}));
  return check;
}

void require_passed(const GradientCheck& check) {
  if (check.passed()) return;
  std::ostringstream text;
  text << "gradient check failed, no speed is shown: worst error " << check.worst_error << " (" << check.tensor
       << "), loss error " << check.loss_error << ", allowed " << check.bound << "; " << check.tokens << " tokens, "
       << check.layers << " layers, against double precision on the CPU";
  throw std::runtime_error(text.str());
}

}  // namespace oomb::bench
