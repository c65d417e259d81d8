#include "tests/cluster/group.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "worker/cluster/exchanged_pages.h"

namespace oomb::test {

namespace {

constexpr uint64_t kSeed = 5;
constexpr double kScale = 1.0 / 3.0;
const TensorTypes kDouble{at::kDouble, at::Device(at::kCPU)};

struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};

ChosenPages pages_of(const attention::Selection& s) {
  if (s.all_past) return {-1};
  ChosenPages out;
  const at::Tensor pages = s.host.defined() ? s.host : s.pages;
  for (int64_t i = 0; i < pages.numel(); ++i) out.push_back(pages.const_data_ptr<int32_t>()[i]);
  return out;
}

std::map<std::string, at::Tensor> grads_of(const model::Parameters& parameters) {
  std::map<std::string, at::Tensor> out;
  for (const model::Parameter& p : parameters.all()) out[p.name] = p.grad;
  return out;
}

// What one worker needs for its own chunks, whose number depends on who owns the first.
int64_t most_own_pages(const ChunkGrid& grid, int num_workers) {
  const int64_t chunks = (grid.num_chunks() + num_workers - 1) / num_workers;
  return std::min(chunks * (grid.chunk_tokens / grid.page_tokens), grid.num_pages());
}

class Worker {
 public:
  Worker(model::Parameters* parameters, const PipelineOptions& options, int64_t num_tokens, const GroupOptions& group,
         comm::Transport* transport)
      : transport_(transport),
        homes_(transport, group.wait_seconds),
        parameters_(parameters),
        layout_(SequencePipeline::page_layout(parameters->config(), options, kDouble, num_tokens)) {
    const model::ModelConfig& config = parameters->config();
    const ChunkGrid grid{num_tokens, options.chunk_tokens, options.selection.page_tokens};
    const int num_workers = transport->size();
    const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    pages::PageMemory::Options memory;
    memory.host_bytes = most_own_pages(grid, num_workers) * layout_.num_layers *
                        (aligned(layout_.kv_slot_bytes) + aligned(layout_.gradient_slot_bytes));
    memory.segment_bytes = 1;  // one slot each: no arena takes more than it needs
    memory.host_homes = homes_.registered(pages::host_segments(), comm::MemoryKind::kHost);
    memory_.emplace(layout_, memory);

    cluster::ExchangedPages::Options exchange;
    exchange.layout = layout_;
    exchange.shape = {config.num_kv_heads, options.selection.page_tokens, config.head_dim};
    exchange.gradient_dtype = options.gradient_dtype;
    exchange.types = kDouble;
    exchange.slots = cluster::plan_transfer_slots(grid, options.selection, num_workers, layout_, group.cache_bytes);
    exchange.wait_seconds = group.wait_seconds;
    const int64_t bytes = std::max<int64_t>(cluster::transfer_bytes(exchange.slots, layout_), 256);
    transfer_.reset(static_cast<char*>(std::aligned_alloc(256, static_cast<size_t>(bytes))));
    pages_.emplace(transport, &homes_, transfer_.get(), comm::MemoryKind::kHost, exchange);
    pages_->begin_step(group.step);
    pipeline_.emplace(parameters_, options, &*memory_, &*pages_);
  }

  void run(const std::vector<int64_t>& ids, const std::vector<int64_t>& labels, const GroupOptions& group,
           std::mutex* mutex, GroupResult* result) {
    PipelineObserver observer;
    observer.on_selection = [&](int64_t chunk, int64_t layer, const attention::Selection& s) {
      const std::lock_guard lock(*mutex);
      ChosenPages pages = pages_of(s);
      const auto [at, is_new] = result->selections.try_emplace({chunk, layer}, pages);
      if (!is_new && at->second != pages) result->errors.emplace_back("a chunk chose differently in the same sequence");
    };
    pipeline_->set_observer(observer);
    for (int64_t i = 0; i < group.num_sequences; ++i) {
      const SequenceLoss loss =
          group.evaluate ? pipeline_->evaluate(ids, labels) : pipeline_->train(ids, labels, kScale);
      const std::lock_guard lock(*mutex);
      result->loss_sum += loss.loss_sum;
      result->num_labels += loss.num_labels;
    }
    const std::lock_guard lock(*mutex);
    result->grads_of_rank[static_cast<size_t>(transport_->rank())] = grads_of(*parameters_);
    result->ledgers[static_cast<size_t>(transport_->rank())] = pages_->ledger();
    if (memory_->slots_in_use() != 0) result->errors.emplace_back("pages left behind");
  }

  /// Leaves the network. The memory stays: a get that failed may still write to it until the network is gone.
  void leave() {
    pipeline_.reset();
    pages_.reset();
  }

 private:
  comm::Transport* transport_;
  std::unique_ptr<char, FreeMemory> transfer_;
  cluster::SegmentRegistry homes_;
  model::Parameters* parameters_;
  pages::PageLayout layout_;
  std::optional<pages::PageMemory> memory_;
  std::optional<cluster::ExchangedPages> pages_;
  std::optional<SequencePipeline> pipeline_;
};

double norm_of(const at::Tensor& x) { return x.norm().item<double>(); }

}  // namespace

GroupResult run_group(const model::ModelConfig& config, const PipelineOptions& options, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& labels, const GroupOptions& group) {
  const int num_workers = group.network.num_workers;
  auto network = std::make_unique<comm::TwinNetwork>(group.network);
  if (group.lose_rank >= 0) network->lose_after(group.lose_rank, group.lose_after);
  GroupResult result;
  result.grads_of_rank.resize(static_cast<size_t>(num_workers));
  result.ledgers.assign(static_cast<size_t>(num_workers), cluster::ExchangeLedger(config.num_layers));
  std::mutex mutex;
  // Workers live until all have ended: what one still serves to others must not be gone.
  std::vector<std::unique_ptr<Worker>> workers(static_cast<size_t>(num_workers));
  // LibTorch's default generator, from which weights are drawn, is one for all threads.
  std::vector<std::unique_ptr<model::Parameters>> parameters;
  for (int rank = 0; rank < num_workers; ++rank) {
    const c10::InferenceMode no_autograd;
    parameters.push_back(std::make_unique<model::Parameters>(config, kDouble, /*training=*/true));
    randomise(*parameters.back(), kSeed);
    parameters.back()->zero_gradients();
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_workers; ++rank) {
    threads.emplace_back([&, rank] {
      const c10::InferenceMode no_autograd;
      comm::Transport& transport = network->transport(rank);
      try {
        auto& worker = workers[static_cast<size_t>(rank)];
        worker = std::make_unique<Worker>(parameters[static_cast<size_t>(rank)].get(), options,
                                          static_cast<int64_t>(ids.size()), group, &transport);
        worker->run(ids, labels, group, &mutex, &result);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        result.errors.push_back("worker " + std::to_string(rank) + ": " + error.what());
        network->lose(rank);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& violation : network->violations()) result.errors.push_back(violation);
  for (auto& worker : workers) {
    if (worker) worker->leave();
  }
  network.reset();
  for (const auto& grads : result.grads_of_rank) {
    for (const auto& [name, grad] : grads) {
      const auto [at, is_new] = result.grads.try_emplace(name, grad.clone());
      if (!is_new) at->second.add_(grad);
    }
  }
  return result;
}

GroupResult run_alone(const model::ModelConfig& config, const PipelineOptions& options, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& labels, bool evaluate) {
  const c10::InferenceMode no_autograd;
  Rig rig(config, options, kDouble, static_cast<int64_t>(ids.size()), kSeed);
  GroupResult result;
  PipelineObserver observer;
  observer.on_selection = [&](int64_t chunk, int64_t layer, const attention::Selection& s) {
    result.selections[{chunk, layer}] = pages_of(s);
  };
  rig.pipeline.set_observer(observer);
  const SequenceLoss loss = evaluate ? rig.pipeline.evaluate(ids, labels) : rig.pipeline.train(ids, labels, kScale);
  result.loss_sum = loss.loss_sum;
  result.num_labels = loss.num_labels;
  for (const auto& [name, grad] : grads_of(rig.parameters)) result.grads[name] = grad.clone();
  return result;
}

double expect_same(const GroupResult& group, const GroupResult& alone, const std::string& what, int64_t num_sequences) {
  for (const std::string& error : group.errors) ADD_FAILURE() << what << ": " << error;
  const auto times = static_cast<double>(num_sequences);
  EXPECT_NEAR(group.loss_sum, times * alone.loss_sum, 1e-9 * std::abs(times * alone.loss_sum)) << what;
  EXPECT_EQ(group.num_labels, num_sequences * alone.num_labels) << what;
  EXPECT_EQ(group.selections, alone.selections) << what;
  double sum = 0;
  for (const auto& [name, grad] : alone.grads) sum += std::pow(times * norm_of(grad), 2);
  const double floor = 1e-6 * std::sqrt(sum);
  double worst = 0;
  for (const auto& [name, grad] : alone.grads) {
    const auto found = group.grads.find(name);
    if (found == group.grads.end()) {
      ADD_FAILURE() << what << ": no gradient of " << name;
      continue;
    }
    const at::Tensor expected = grad * times;
    const double bound = std::max(norm_of(expected), floor);
    const double relative = bound > 0 ? norm_of(found->second - expected) / bound : norm_of(found->second);
    EXPECT_LE(relative, 1e-9) << what << ", " << name;
    worst = std::max(worst, relative);
  }
  return worst;
}

PipelineOptions dense_options(int64_t chunk, int64_t page, int64_t tile) {
  PipelineOptions o;
  o.chunk_tokens = chunk;
  o.selection.dense = true;
  o.selection.page_tokens = page;
  o.selection.query_tile = tile;
  o.gradient_dtype = at::kDouble;
  o.loss_row_tile = 64;
  return o;
}

PipelineOptions topk_options(int64_t chunk, int64_t page, int64_t tile, int64_t budget, int64_t chunk_pages) {
  PipelineOptions o = dense_options(chunk, page, tile);
  o.selection.dense = false;
  o.selection.budget_pages = budget;
  o.selection.chunk_pages = chunk_pages;
  o.selection.score_scale = 0.7;
  return o;
}

}  // namespace oomb::test
