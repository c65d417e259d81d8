// Costs against what one H200 took, the order of work, the simulated step, and network bytes against enumeration.
#include <gtest/gtest.h>

#include <set>

#include "coordinator/plan/plan.h"
#include "worker/sizes/page_demand.h"

namespace oomb::plan {
namespace {

model::ModelConfig qwen() { return model::read_hf_config(OOMB_SOURCE_FOLDER "/configs/models/qwen2.5-7b.json"); }

RunConfig run_of(const std::vector<std::string>& settings) {
  std::vector<std::string> all = {"train.compute_dtype=bf16", "sequence.chunk=4096", "train.optimizer_state=int8",
                                  "train.master_weights=stochastic_rounding"};
  all.insert(all.end(), settings.begin(), settings.end());
  return parse_run_config("model: {config: m.json}\ndata: {kind: copy}\n", "run.yaml", "/base", all);
}

Hardware hardware_of(const char* topology) {
  const std::string path = std::string(OOMB_SOURCE_FOLDER "/configs/topologies/") + topology + ".yaml";
  return resolve(load_topology(path), MachineFacts{}, path);
}

// One group of all workers, nothing kept but the last chunk, everything in HBM.
struct Case7B {
  RunConfig config;
  model::ModelConfig model = qwen();
  Hardware hardware = hardware_of("node-8xh200");
  Layout layout;
  MemoryPlan memory;
  explicit Case7B(const std::vector<std::string>& settings, std::int64_t workers = 1) : config(run_of(settings)) {
    layout = {workers, workers, config.train.sequences_per_step};
    memory.homes_in_hbm = memory.gradients_in_hbm = 1;
    memory.level = Activations::kAll;
    memory.kept_chunks = memory.whole_chunks = 1;
  }
  StepTime time() const {
    const CostModel cost(config, model, hardware.rates);
    const TrafficModel traffic(config, model, layout);
    return simulate({config, model, hardware, layout, memory, cost, traffic});
  }
};

TEST(Cost, OneLayerOnAnH200AsMeasured) {
  const Case7B s({"sequence.length=1048576"});
  const LayerCost cost = CostModel(s.config, s.model, s.hardware.rates).layer(4096, 4096);
  // Linear layers 2.52 ms alone, 2.85 ms at the rate that a whole step sustains; 0.2 ms of element-wise kernels.
  EXPECT_NEAR(cost.project + cost.finish, 2.85e-3 + 0.2e-3, 0.05e-3);
  EXPECT_NEAR(cost.past, 0.76e-3, 0.01e-3);
  EXPECT_NEAR(cost.past_backward, 2.19e-3, 0.03e-3);
  // Two forwards and a backward with 64 pages: floor 15.6 ms; 18.4 ms seen on the way there.
  const double both = 2 * cost.forward() + cost.backward();
  EXPECT_GT(both, 15.0e-3);
  EXPECT_LT(both, 18.4e-3);
  // Votes over 8,192 pages with a key bias: 0.79 ms.
  EXPECT_NEAR(CostModel(s.config, s.model, s.hardware.rates).layer(4096, 8192).select, 0.79e-3, 0.03e-3);
}

TEST(Cost, FloorOfAStepAsDerived) {
  // Two forwards and one backward of every chunk: 8,300 to 8,900 tokens/s.
  const double tokens_per_second = 262'144 / Case7B({"sequence.length=262144"}).time().total;
  EXPECT_GT(tokens_per_second, 0.95 * 8'300);
  EXPECT_LT(tokens_per_second, 8'900);
}

TEST(Cost, ExactAttentionAsDerived) {
  // 2,070 tokens/s at 256K: linear 79 us and attention 403 us per token.
  const Case7B s({"sequence.length=262144", "attention.kind=dense"});
  EXPECT_NEAR(262'144 / s.time().total, 2070, 200);
}

TEST(Order, EveryChunkTwiceByItsOwner) {
  for (const std::int64_t workers : {1, 2, 3, 7}) {
    for (const std::int64_t offset : {0, 2}) {
      MemoryPlan memory;
      memory.kept_chunks = 2;
      memory.whole_chunks = 1;
      const std::vector<Task> order = order_of_work(11, workers, offset, memory);
      ASSERT_EQ(order.size(), 22u);
      std::int64_t kept = 0, whole = 0;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const Task& task = order[i];
        EXPECT_EQ(task.work, i < 11 ? Work::kFill : Work::kBackward);
        EXPECT_EQ(task.chunk, static_cast<std::int64_t>(i < 11 ? i : 21 - i));
        EXPECT_EQ(task.worker, (task.chunk + offset) % workers);
        EXPECT_TRUE(task.kept || !task.whole);
        kept += task.kept;
        whole += task.whole;
      }
      EXPECT_EQ(kept, 2 * std::min<std::int64_t>(2 * workers, 11));
      EXPECT_EQ(whole, 2 * std::min<std::int64_t>(workers, 11));
    }
  }
}

TEST(Order, EveryKthRoundFromTheLast) {
  const std::vector<Task> order = order_of_work(11, 3, 0, {}, 2);
  std::vector<std::int64_t> filled;
  for (const Task& task : order) {
    if (task.work == Work::kFill) filled.push_back(task.chunk);
  }
  EXPECT_EQ(filled, (std::vector<std::int64_t>{2, 3, 4, 8, 9, 10}));
  EXPECT_EQ(order.size(), 12u);
}

TEST(Simulation, RoundsStandForThoseBetween) {
  // Twice the chunks of what is simulated one by one, so every second round; the step must take twice as long.
  const auto seconds = [](std::int64_t chunks) {
    Case7B s({"sequence.length=" + std::to_string(chunks * 16), "sequence.chunk=16", "attention.page_tokens=16",
              "attention.budget_pages=4", "attention.chunk_pages=4"},
             4);
    s.model.num_layers = 1;
    s.hardware.rates.select = 1e30;  // the only part that grows with the past
    s.hardware.rates.intra_node = 1e15;
    const StepTime t = s.time();
    return t.total - t.optimizer - t.collectives;
  };
  EXPECT_NEAR(seconds(1 << 18) / seconds(1 << 17), 2, 0.01);
}

TEST(Simulation, OneWorkerNeverWaits) {
  const Case7B s({"sequence.length=131072"});
  const StepTime t = s.time();
  EXPECT_DOUBLE_EQ(t.total, t.compute + t.optimizer);
  EXPECT_EQ(t.wait_means + t.wait_pages + t.wait_host + t.wait_contributions + t.tail + t.collectives, 0);
  EXPECT_NEAR(t.pass1 + t.pass2 + t.optimizer, t.total, 1e-9);
}

TEST(Simulation, TailOfTheLastRound) {
  // Without past pages all chunks cost the same and nobody waits: 5 chunks on 4 workers leave 3 of 8 turns empty.
  Case7B bare({"sequence.length=20480", "attention.budget_pages=0"}, 4);
  bare.memory.kept_chunks = bare.memory.whole_chunks = 0;
  const StepTime t = bare.time();
  const double turns = t.total - t.optimizer - t.collectives;
  EXPECT_NEAR(t.tail / turns, 1 - 5.0 / 8, 0.02);  // pass 1 of the last layer ends early, so turns differ a little
  EXPECT_EQ(t.wait_means + t.wait_pages + t.wait_contributions, 0);
}

TEST(Simulation, WorkersInLockstepShareTheWork) {
  const std::vector<std::string> settings = {"sequence.length=524288"};
  const Case7B one(settings), eight(settings, 8);
  const StepTime t1 = one.time(), t8 = eight.time();
  EXPECT_NEAR(t8.compute, t1.compute / 8, 0.02 * t1.compute / 8);
  EXPECT_GT(t8.total, t1.total / 8);
  EXPECT_LT(t8.total, 1.1 * t1.total / 8) << "over NVLink";
}

TEST(Simulation, SlowerLinksWaitLonger) {
  double before = 0;
  for (const double gbytes : {370.0, 45.0, 5.0, 0.5}) {
    Case7B s({"sequence.length=524288"}, 8);
    s.hardware.rates.intra_node = gbytes * 1e9;
    const StepTime t = s.time();
    EXPECT_GT(t.total, before);
    before = t.total;
    if (gbytes == 0.5) {
      // All bytes of one worker through its link are a lower bound.
      const StepTraffic traffic = TrafficModel(s.config, s.model, s.layout).step(s.memory);
      EXPECT_GT(t.total, (traffic.pages / 8 + traffic.contributions / 8) / 0.5e9 * 0.5);
      EXPECT_GT(t.wait_pages, t.compute);
    }
  }
}

TEST(Simulation, PagesOnTheHostCostTransfers) {
  Case7B s({"sequence.length=1048576"});
  const double all_in_hbm = s.time().total;
  s.memory.gradients_in_hbm = 0;
  const StepTime gradients = s.time();
  EXPECT_GT(gradients.wait_host, 0);
  s.memory.homes_in_hbm = 0;
  const StepTime both = s.time();
  EXPECT_GT(gradients.total, all_in_hbm);
  EXPECT_GT(both.total, gradients.total);
  EXPECT_GT(both.pass1, 1.05 * gradients.pass1) << "pass 1 knows its pages too late to hide them";
}

TEST(Simulation, KeptActivationsSaveWork) {
  Case7B s({"sequence.length=131072"});
  const double before = s.time().total;
  s.memory.kept_chunks = 16;
  const double attention_kept = s.time().total;
  s.memory.whole_chunks = 16;
  const double whole_kept = s.time().total;
  EXPECT_LT(attention_kept, before);
  EXPECT_LT(whole_kept, attention_kept);
  s.memory.whole_chunks = 1;
  s.memory.kept_chunks = 1;
  s.memory.host_chunks = 15;
  EXPECT_NEAR(s.time().total, attention_kept, 0.02 * attention_kept) << "59 MB a layer hide behind 4 ms of work";
  s.hardware.rates.pcie = 5e9;
  EXPECT_GT(s.time().total, 1.1 * attention_kept);
  s.memory.host_chunks = 0;
  s.memory.level = Activations::kInput;
  EXPECT_GT(s.time().total, before) << "a third forward for every chunk";
}

TEST(Traffic, RingOverPagesAsDerived) {
  // W C / (U P), forward, without cache hits.
  struct Row {
    std::int64_t workers, chunk, pages;
    double ratio;
  };
  for (const Row& c : {Row{8, 4096, 1129, 0.23}, {8, 4096, 256, 1.0}, {8, 8192, 256, 2.0}, {32, 8192, 256, 8.0}}) {
    const Case7B s({"sequence.length=4194304", "sequence.chunk=" + std::to_string(c.chunk),
                    "attention.chunk_pages=" + std::to_string(c.pages)},
                   c.workers);
    Case7B ring = s;
    ring.config.exchange = Exchange::kRing;
    const std::int64_t late = 4'194'304 / c.chunk - c.workers;  // a multiple of W, where the union is at its bound
    const double pages = TrafficModel(s.config, s.model, s.layout).chunk(late).forward;
    EXPECT_NEAR(TrafficModel(ring.config, ring.model, ring.layout).chunk(late).forward / pages, c.ratio, 0.01);
  }
}

TEST(Traffic, DensePagesAgainstEnumeration) {
  Case7B s({"sequence.length=45000", "attention.kind=dense", "exchange=pages", "topology.workers=3"}, 3);
  const StepTraffic traffic = TrafficModel(s.config, s.model, s.layout).step(s.memory);
  const ChunkGrid grid{45'000, 4096, 128};
  double homes = 0, gradients = 0;
  for (std::int64_t s_reader = 0; s_reader < grid.num_chunks(); ++s_reader) {
    for (std::int64_t owner = 0; owner < s_reader; ++owner) {
      if (owner % 3 == s_reader % 3) continue;
      const double pages = 32 * (256 << 10);
      const bool kept = grid.num_chunks() - 1 - s_reader < 3;  // one chunk of each worker is not computed again
      homes += pages * (kept ? 28 + 28 : 27 + 28 + 28);
      gradients += 28 * 2 * pages;
    }
  }
  EXPECT_NEAR(traffic.pages / homes, 1, 1e-12);
  EXPECT_NEAR(traffic.contributions / gradients, 1, 1e-12);
  EXPECT_EQ(traffic.means, 0) << "dense attention reads no means";
  EXPECT_DOUBLE_EQ(traffic.reduce_scatter, 2.0 * 4 * 7'615'616'512);
  EXPECT_DOUBLE_EQ(traffic.all_gather, 2.0 * 2 * 7'615'616'512);
}

TEST(Traffic, MeansGoToEveryOtherWorker) {
  const Case7B s({"sequence.length=1048576"}, 8);
  const StepTraffic traffic = TrafficModel(s.config, s.model, s.layout).step(s.memory);
  EXPECT_DOUBLE_EQ(traffic.means, 7.0 * 28 * (8192 - 32) * 1024);  // not those of the last chunk
}

TEST(Traffic, OneWorkerSendsNothing) {
  for (const char* exchange : {"auto", "pages"}) {
    const Case7B s({"sequence.length=1048576", std::string("exchange=") + exchange});
    const TrafficModel model(s.config, s.model, s.layout);
    EXPECT_EQ(model.step(s.memory).total(), 0);
    EXPECT_EQ(model.ring().total(), 0);
  }
}

TEST(Traffic, AutoTakesWhatSendsLess) {
  const auto chosen = [](const std::vector<std::string>& settings) {
    const Case7B s(settings, 8);
    return TrafficModel(s.config, s.model, s.layout).exchange();
  };
  EXPECT_EQ(chosen({"sequence.length=1048576"}), Exchange::kPages);
  // Queries have 7 times the heads, but do not grow with the past.
  EXPECT_EQ(chosen({"sequence.length=1048576", "attention.kind=dense"}), Exchange::kQueries);
  EXPECT_EQ(chosen({"sequence.length=32768", "attention.kind=dense"}), Exchange::kPages);
}

}  // namespace
}  // namespace oomb::plan
