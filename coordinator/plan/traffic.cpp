#include "coordinator/plan/traffic.h"

#include <algorithm>

#include "worker/sizes/page_demand.h"

namespace oomb::plan {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

double exchanged(const ChunkTraffic& c) { return c.means + 2 * c.forward + c.backward + c.contributions; }

}  // namespace

TrafficModel::TrafficModel(const RunConfig& config, const model::ModelConfig& model, const Layout& layout)
    : config_(config),
      model_(model),
      layout_(layout),
      grid_{config.sequence.length, config.sequence.chunk, config.attention.page_tokens},
      page_(sizes::page_bytes(model, config)) {
  exchange_ = config.exchange;
  if (exchange_ != Exchange::kAuto) return;
  exchange_ = Exchange::kPages;
  if (config.attention.kind != AttentionKind::kDense) return;
  double pages = 0, queries = 0;
  for (std::int64_t s = 0; s < grid_.num_chunks(); ++s) {
    pages += exchanged(by_pages(s));
    queries += exchanged(by_queries(s));
  }
  if (queries < pages) exchange_ = Exchange::kQueries;
}

ChunkTraffic TrafficModel::by_pages(std::int64_t chunk) const {
  ChunkTraffic traffic;
  const std::int64_t w = layout_.group_workers;
  if (w == 1) return traffic;
  if (sizes::may_select(config_, grid_) && chunk + 1 < grid_.num_chunks())
    traffic.means = real((w - 1) * grid_.pages_of(chunk) * page_.mean);
  if (chunk == 0) return traffic;
  // Of the chunks before, this worker owns every W-th.
  const double others = 1 - real(chunk / w) / real(chunk);
  const double pages = others * sizes::expected_union(config_, real(grid_.first_page_of(chunk)));
  traffic.forward = traffic.backward = pages * real(page_.home);
  traffic.contributions = pages * real(page_.gradient);
  return traffic;
}

ChunkTraffic TrafficModel::by_queries(std::int64_t chunk) const {
  ChunkTraffic traffic;
  const double owners = real(std::min(chunk, layout_.group_workers - 1));
  const double rows = real(grid_.tokens_of(chunk) * model_.num_heads), d = real(model_.head_dim);
  const double element = real(sizes::element_bytes(config_).compute);
  traffic.forward = owners * rows * (d * element + d * 4 + 4);
  traffic.backward = owners * rows * (2 * d * element + 8);
  traffic.contributions = owners * rows * d * 4;
  return traffic;
}

ChunkTraffic TrafficModel::chunk(std::int64_t chunk) const {
  if (exchange_ == Exchange::kQueries) return by_queries(chunk);
  if (exchange_ != Exchange::kRing) return by_pages(chunk);
  // Every worker's share passes through every other one, whatever the chunk.
  const double w = real(layout_.group_workers), tokens = real(grid_.tokens_of(chunk)) / real(grid_.page_tokens);
  const double home =
      real(2 * model_.num_kv_heads * model_.head_dim * grid_.page_tokens) * real(sizes::element_bytes(config_).compute);
  ChunkTraffic traffic;
  if (layout_.group_workers == 1) return traffic;
  traffic.forward = traffic.backward = (w - 1) * tokens * home;
  traffic.contributions = w * tokens * real(page_.gradient);
  return traffic;
}

double TrafficModel::sequences() const { return real(config_.train.sequences_per_step); }

void TrafficModel::add_collectives(StepTraffic& traffic) const {
  // A ring over W workers: each sends W - 1 of W shards.
  const sizes::ElementBytes e = sizes::element_bytes(config_);
  const double hops = real(layout_.workers - 1) * real(num_parameters(model_));
  traffic.reduce_scatter = hops * real(e.acc);
  traffic.all_gather = hops * real(e.compute);
}

StepTraffic TrafficModel::step(const MemoryPlan& memory) const {
  if (exchange_ == Exchange::kRing) return ring();
  StepTraffic traffic;
  const double layers = real(model_.num_layers);
  const std::int64_t chunks = grid_.num_chunks(),
                     first_kept = chunks - (memory.kept_chunks + memory.host_chunks) * layout_.group_workers;
  for (std::int64_t s = 0; s < chunks; ++s) {
    const ChunkTraffic c = chunk(s);
    // Pass 1 of the last layer attends only where activations are kept.
    const double forwards = s >= first_kept ? layers : 2 * layers - 1;
    traffic.means += layers * c.means;
    traffic.pages += forwards * c.forward + layers * c.backward;
    traffic.contributions += layers * c.contributions;
  }
  for (double* sum : {&traffic.means, &traffic.pages, &traffic.contributions}) *sum *= sequences();
  add_collectives(traffic);
  return traffic;
}

StepTraffic TrafficModel::ring() const {
  StepTraffic traffic;
  const double w = real(layout_.group_workers), row = real(2 * model_.num_kv_heads * model_.head_dim);
  const double rows = row * real(config_.sequence.length) * real(model_.num_layers) * sequences();
  const sizes::ElementBytes e = sizes::element_bytes(config_);
  if (layout_.group_workers > 1) {
    traffic.pages = 3 * (w - 1) * rows * real(e.compute);
    traffic.contributions = w * rows * real(e.page_gradient);
  }
  add_collectives(traffic);
  return traffic;
}

}  // namespace oomb::plan
