#include "coordinator/plan/simulate.h"

#include <algorithm>

#include "worker/sizes/page_demand.h"

namespace oomb::plan {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

constexpr std::int64_t kSimulatedChunks = 1 << 17;

void scale(StepTime& time, double factor) {
  for (double* seconds : {&time.total, &time.pass1, &time.pass2, &time.compute, &time.wait_means, &time.wait_pages,
                          &time.wait_host, &time.wait_contributions, &time.tail}) {
    *seconds *= factor;
  }
}

// A link or engine that serves one transfer after another.
struct Channel {
  double free_at = 0;
  // Ends at the returned time; starts when both the caller and the channel are ready.
  double send(double ready, double seconds) {
    if (seconds <= 0) return ready;
    free_at = std::max(free_at, ready) + seconds;
    return free_at;
  }
};

struct Worker {
  double now = 0;          // when its GPU is free
  double layer_begun = 0;  // of the layer before: transfers of pass 2 run one layer ahead
  Channel network_in, network_out, host_in, host_out;
  StepTime spent;

  void compute(double seconds) {
    now += seconds;
    spent.compute += seconds;
  }
  void wait(double until, double& account) {
    if (until <= now) return;
    account += until - now;
    now = until;
  }
};

class Simulation {
 public:
  explicit Simulation(const SimulationInput& in)
      : in_(in),
        grid_{in.config.sequence.length, in.config.sequence.chunk, in.config.attention.page_tokens},
        workers_(static_cast<std::size_t>(in.layout.group_workers)),
        arrived_(static_cast<std::size_t>(in.model.num_layers)),
        page_(sizes::page_bytes(in.model, in.config)) {
    const Rates& r = in.hardware.rates;
    const bool one_node = in.hardware.all_on_one_node(in.layout.group_workers);
    releases_ = in.layout.group_workers > 1 &&
                (in.config.attention.kind == AttentionKind::kDense || in.config.attention.budget_pages > 0);
    network_ = one_node ? r.intra_node : r.inter_node;
    latency_ = one_node ? r.intra_node_latency : r.inter_node_latency;
  }

  // One sequence; all workers begin together.
  StepTime run() {
    const std::int64_t chunks = grid_.num_chunks(), every = (chunks + kSimulatedChunks - 1) / kSimulatedChunks;
    const std::vector<Task> order = order_of_work(chunks, in_.layout.group_workers, 0, in_.memory, every);
    bool second = false;
    for (const Task& task : order) {
      if (task.work == Work::kBackward && !second) {
        second = true;
        pass1_ = latest();
        std::fill(arrived_.begin(), arrived_.end(), 0.0);
      }
      prepare(task);
      if (task.work == Work::kFill) {
        fill(task);
      } else {
        backward(task);
      }
    }
    return summary(2 * real(chunks) / real(static_cast<std::int64_t>(order.size())));
  }

 private:
  double latest() const {
    return std::max_element(workers_.begin(), workers_.end(), [](auto& a, auto& b) { return a.now < b.now; })->now;
  }

  // What all layers of the chunk have in common.
  void prepare(const Task& task) {
    worker_ = &workers_[static_cast<std::size_t>(task.worker)];
    const std::int64_t past = grid_.first_page_of(task.chunk);
    cost_ = in_.cost.layer(grid_.tokens_of(task.chunk), past);
    const ChunkTraffic bytes = in_.traffic.chunk(task.chunk);
    const auto over = [&](double b) { return network_ > 0 ? b / network_ : 0; };
    means_ = over(bytes.means);
    fetch_ = over(bytes.forward);
    fetch_again_ = over(bytes.backward);
    contributions_ = over(bytes.contributions);
    own_part_ = task.chunk == 0 ? 1 : real(task.chunk / in_.layout.group_workers) / real(task.chunk);
    const double united = sizes::expected_union(in_.config, real(past));
    const double bus = in_.hardware.gpu ? in_.hardware.rates.pcie : 0;  // a CPU worker's pages are where it computes
    const auto over_bus = [&](double pages, std::int64_t slot) { return bus > 0 ? pages * real(slot) / bus : 0; };
    const double own_union = own_part_ * united;
    host_fetch_ = over_bus(own_union * (1 - in_.memory.homes_in_hbm), page_.home);
    host_gradients_ = over_bus(united * (1 - in_.memory.gradients_in_hbm), page_.gradient);
    host_activations_ = over_bus(1, sizes::host_activation_bytes(in_.model, in_.config) / in_.model.num_layers);
    host_write_ = over_bus(real(grid_.pages_of(task.chunk)) * (1 - in_.memory.homes_in_hbm), page_.home);
  }

  double& arrived(std::int64_t layer) { return arrived_[static_cast<std::size_t>(layer)]; }

  // Waits for what chunks before in the order released at this layer, then releases what the next ones wait for; that
  // is said even where it is nothing.
  void pass_on(double& last, double released, double& account) {
    if (!releases_) return;
    worker_->wait(last, account);
    last = std::max(last, released);
  }

  void fill(const Task& task) {
    Worker& w = *worker_;
    for (std::int64_t l = 0; l < in_.model.num_layers; ++l) {
      w.compute(cost_.project);
      w.host_out.send(w.now, host_write_);
      // Means are released when the page is at home; chunks before this one have released theirs.
      const double published = w.network_out.send(w.now, means_) + latency_;
      w.compute(cost_.own);
      pass_on(arrived(l), published, w.spent.wait_means);
      w.compute(cost_.select);
      if (l + 1 == in_.model.num_layers && !task.kept) break;
      const double fetched = w.network_in.send(w.now, fetch_) + (fetch_ > 0 ? latency_ : 0);
      const double copied = w.host_in.send(w.now, host_fetch_);
      w.wait(copied, w.spent.wait_host);
      w.compute(own_part_ * cost_.past);
      w.wait(fetched, w.spent.wait_pages);
      w.compute((1 - own_part_) * cost_.past);
      if (task.host) w.host_out.send(w.now, host_activations_);
      w.compute(cost_.finish);
    }
  }

  // The forward of a chunk whose attention is not kept, then its loss.
  void compute_again(const Task& task) {
    Worker& w = *worker_;
    for (std::int64_t l = 0; l < in_.model.num_layers && !task.whole; ++l) {
      if (!task.kept) {
        const double fetched = w.network_in.send(w.layer_begun, fetch_),
                     copied = w.host_in.send(w.layer_begun, host_fetch_);
        w.layer_begun = w.now;
        w.compute(cost_.project + cost_.own);
        w.wait(copied, w.spent.wait_host);
        w.wait(fetched, w.spent.wait_pages);
        w.compute(cost_.past);
        w.compute(cost_.finish);
      } else {
        if (task.host) w.wait(w.host_in.send(w.layer_begun, host_activations_), w.spent.wait_host);
        w.layer_begun = w.now;
        w.compute(cost_.project + cost_.finish - cost_.down);
      }
    }
    w.compute(in_.cost.head(grid_.tokens_of(task.chunk)));
  }

  // What the level leaves out is computed again layer by layer.
  double restored() const {
    switch (in_.memory.level) {
      case Activations::kAttention:
        return cost_.project + cost_.finish - cost_.down;
      case Activations::kInput:
        return cost_.forward() - cost_.down;
      case Activations::kAuto:
      case Activations::kAll:
      case Activations::kNoNorms:
        return 0;
    }
    return 0;
  }

  void backward(const Task& task) {
    Worker& w = *worker_;
    compute_again(task);
    for (std::int64_t l = in_.model.num_layers - 1; l >= 0; --l) {
      const double fetched = w.network_in.send(w.layer_begun, fetch_again_);
      const double copied = w.host_in.send(w.layer_begun, host_fetch_ + host_gradients_);
      w.layer_begun = w.now;
      w.compute(restored() + cost_.finish_inputs + cost_.own_backward);
      w.wait(copied, w.spent.wait_host);
      w.wait(fetched, w.spent.wait_pages);
      w.compute(cost_.past_backward);
      w.host_out.send(w.now, host_gradients_);
      const double sent = w.network_out.send(w.now, contributions_) + latency_;
      w.compute(cost_.finish_weights);
      pass_on(arrived(l), sent, w.spent.wait_contributions);
      w.compute(cost_.project_backward);
    }
  }

  // Each simulated chunk stands for `weight` chunks.
  StepTime summary(double weight) const {
    StepTime mean;
    const double end = latest(), count = real(in_.layout.group_workers);
    for (const Worker& w : workers_) {
      mean.compute += w.spent.compute / count;
      mean.wait_means += w.spent.wait_means / count;
      mean.wait_pages += w.spent.wait_pages / count;
      mean.wait_host += w.spent.wait_host / count;
      mean.wait_contributions += w.spent.wait_contributions / count;
      mean.tail += (end - w.now) / count;
    }
    mean.pass1 = pass1_;
    mean.pass2 = end - pass1_;
    mean.total = end;
    scale(mean, weight);
    return mean;
  }

  const SimulationInput& in_;
  ChunkGrid grid_;
  std::vector<Worker> workers_;
  std::vector<double> arrived_;  // per layer: when what the next chunk in the order waits for is there
  sizes::PageBytes page_;
  bool releases_ = false;  // whether chunks depend on each other across workers
  double network_ = 0, latency_ = 0, pass1_ = 0;
  // Of the chunk at work, per layer, in seconds.
  Worker* worker_ = nullptr;
  LayerCost cost_;
  double means_ = 0, fetch_ = 0, fetch_again_ = 0, contributions_ = 0;
  double own_part_ = 1, host_fetch_ = 0, host_gradients_ = 0, host_write_ = 0, host_activations_ = 0;
};

}  // namespace

std::vector<Task> order_of_work(std::int64_t chunks, std::int64_t workers, std::int64_t offset,
                                const MemoryPlan& memory, std::int64_t every) {
  std::vector<Task> order;
  order.reserve(static_cast<std::size_t>(2 * chunks / every + 4 * workers));
  // `newer`: chunks of the same worker after this round's.
  for (std::int64_t newer = (chunks - 1) / workers / every * every; newer >= 0; newer -= every) {
    const bool in_hbm = newer < memory.kept_chunks, kept = newer < memory.kept_chunks + memory.host_chunks;
    const bool whole = newer < memory.whole_chunks;
    const std::int64_t end = chunks - newer * workers;
    for (std::int64_t s = std::max<std::int64_t>(end - workers, 0); s < end; ++s) {
      order.push_back({Work::kFill, s, owner_of(s, offset, workers), kept, kept && !in_hbm, whole});
    }
  }
  for (std::size_t i = order.size(); i > 0; --i) {
    order.push_back(order[i - 1]);
    order.back().work = Work::kBackward;
  }
  return order;
}

StepTime simulate(const SimulationInput& in) {
  StepTime step = Simulation(in).run();
  scale(step, real(in.layout.sequences_per_group));
  const std::int64_t workers = in.layout.workers, parameters = num_parameters(in.model);
  step.optimizer = in.cost.optimizer((parameters + workers - 1) / workers);
  if (workers > 1) {
    const Rates& r = in.hardware.rates;
    const bool one_node = in.hardware.all_on_one_node(workers);
    const StepTraffic traffic = in.traffic.ring();  // its collectives are those of every exchange
    step.collectives =
        (traffic.reduce_scatter + traffic.all_gather) / real(workers) / (one_node ? r.intra_node : r.inter_node) +
        2 * real(workers - 1) * (one_node ? r.intra_node_latency : r.inter_node_latency);
  }
  step.total += step.optimizer + step.collectives;
  return step;
}

}  // namespace oomb::plan
