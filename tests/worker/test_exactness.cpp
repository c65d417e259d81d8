// Exactness of the chunked step: double precision against full-sequence autograd.
//
// Rule for every parameter tensor: |a - b| <= 1e-9 * max(|b|, 1e-6 * |all gradients|). The worst errors are printed as
// a table, which docs/exactness.md repeats.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/worker/oracle.h"

namespace oomb::test {
namespace {

const TensorTypes kDouble{at::kDouble, at::Device(at::kCPU)};

PipelineOptions options_of(int64_t chunk, int64_t page, int64_t tile) {
  PipelineOptions o;
  o.chunk_tokens = chunk;
  o.selection.dense = true;
  o.selection.page_tokens = page;
  o.selection.query_tile = tile;
  o.gradient_dtype = at::kDouble;
  o.loss_row_tile = 5;  // divides no chunk: the last tile is always partial
  return o;
}

PipelineOptions sparse_of(int64_t chunk, int64_t page, int64_t tile, int64_t budget, int64_t chunk_pages = 0) {
  PipelineOptions o = options_of(chunk, page, tile);
  o.selection.dense = false;
  o.selection.budget_pages = budget;
  o.selection.chunk_pages = chunk_pages;
  o.selection.score_scale = 0.7;
  return o;
}

double norm_of_all(const std::map<std::string, at::Tensor>& grads) {
  double sum = 0;
  for (const auto& [name, g] : grads) sum += g.pow(2).sum().item<double>();
  return std::sqrt(sum);
}

// Worst of |a - b| / max(|b|, 1e-6 |all|) over the tensors; must be <= bound.
double compare_gradients(const model::Parameters& parameters, const OracleResult& oracle, double bound,
                         const std::string& what) {
  const double all = norm_of_all(oracle.grads);
  double worst = 0;
  for (const model::Parameter& p : parameters.all()) {
    const at::Tensor& expected = oracle.grads.at(p.name);
    const double error = (p.grad.to(at::kDouble) - expected).norm().item<double>();
    const double relative = error / std::max(expected.norm().item<double>(), 1e-6 * all);
    EXPECT_LE(relative, bound) << what << ", " << p.name;
    worst = std::max(worst, relative);
  }
  return worst;
}

struct Outcome {
  double loss_error = 0, gradient_error = 0;
};

Outcome run(const model::ModelConfig& config, const PipelineOptions& options, int64_t n, const std::string& what,
            double key_bias_norm = 0) {
  const auto ids = random_ids(n, config.vocab_size, 77 + static_cast<uint64_t>(n));
  const auto labels = shifted_labels(ids, /*with_holes=*/n > 2);
  Rig rig(config, options, kDouble, n, /*seed=*/5, 0, key_bias_norm);
  std::map<std::pair<int64_t, int64_t>, attention::Selection> seen;
  PipelineObserver observer;
  observer.on_selection = [&](int64_t chunk, int64_t layer, const attention::Selection& s) {
    EXPECT_TRUE(seen.emplace(std::make_pair(chunk, layer), s).second) << what << ": chosen twice, chunk " << chunk;
  };
  rig.pipeline.set_observer(observer);
  const double scale = 1.0 / 3.0;
  const SequenceLoss loss = rig.pipeline.train(ids, labels, scale);
  const OracleResult oracle = full_sequence_autograd(rig.parameters, options, ids, labels, scale);
  const double loss_error = std::abs(loss.loss_sum - oracle.loss_sum) / std::abs(oracle.loss_sum);
  EXPECT_LE(loss_error, 1e-12) << what;
  for (const auto& [key, s] : seen) {
    const auto& expected = oracle.selections[key.second][key.first];
    EXPECT_EQ(s.all_past, expected.empty()) << what;
    if (s.all_past) continue;
    for (int64_t t = 0; t < s.num_tiles; ++t) {
      std::vector<int64_t> pages;
      for (int64_t j = 0; j < s.pages_per_tile; ++j) pages.push_back(s.page(t, j));
      EXPECT_EQ(pages, expected[t]) << what << ", chunk " << key.first << ", layer " << key.second << ", tile " << t;
    }
  }
  EXPECT_EQ(rig.memory.slots_in_use(), 0) << what << ": pages left behind";
  return {loss_error, compare_gradients(rig.parameters, oracle, 1e-9, what)};
}

TEST(Exactness, DenseEqualsFullSequenceAutograd) {
  struct Cut {
    int64_t chunk, page, tile;
  };
  struct Heads {
    int64_t q, kv;
    bool tied;
  };
  std::printf("%8s %6s %4s %4s %6s %5s   %-10s %-10s\n", "N", "C", "P", "T", "heads", "tied", "loss", "gradient");
  for (const Cut cut : {Cut{8, 4, 4}, Cut{12, 3, 6}, Cut{16, 1, 16}, Cut{7, 7, 7}}) {
    const int64_t c = cut.chunk, p = cut.page;
    for (const int64_t n : {int64_t{2}, p - 1, p, p + 1, c - 1, c, c + 1, 2 * c, 5 * c + 3, 6 * c - 1}) {
      if (n < 2) continue;
      for (const Heads heads : {Heads{4, 2, false}, Heads{3, 1, true}, Heads{2, 2, false}}) {
        const std::string what = "N=" + std::to_string(n) + " C=" + std::to_string(c) + " P=" + std::to_string(p) +
                                 " heads=" + std::to_string(heads.q) + "/" + std::to_string(heads.kv);
        const Outcome r = run(small_config(heads.q, heads.kv, heads.tied), options_of(c, p, cut.tile), n, what);
        std::printf("%8ld %6ld %4ld %4ld %4ld/%ld %5s   %-10.2e %-10.2e\n", n, c, p, cut.tile, heads.q, heads.kv,
                    heads.tied ? "yes" : "no", r.loss_error, r.gradient_error);
      }
    }
  }
}

TEST(Exactness, SmallBudgetsEqualAReferenceThatMasksTheSamePages) {
  std::printf("%8s %6s %4s %4s %4s %4s %s\n", "N", "C", "P", "T", "B", "M", "gradient");
  const auto check = [](PipelineOptions o, int64_t n, const char* kind) {
    const auto& r = o.selection;
    const std::string what = std::string(kind) + " N=" + std::to_string(n) + " C=" + std::to_string(o.chunk_tokens) +
                             " B=" + std::to_string(r.budget_pages) + " M=" + std::to_string(r.chunk_pages);
    const Outcome out = run(small_config(), o, n, what);
    std::printf("%8ld %6ld %4ld %4ld %4ld %4ld %.2e %s\n", n, o.chunk_tokens, r.page_tokens, r.query_tile,
                r.budget_pages, r.chunk_pages, out.gradient_error, kind);
  };
  for (const int64_t n : {61, 80, 96, 97}) {
    check(sparse_of(16, 4, 4, 2), n, "top-k");
    check(sparse_of(16, 4, 8, 3), n, "top-k, tile of two pages");
    check(sparse_of(16, 4, 16, 1), n, "top-k, tile = chunk");
    check(sparse_of(16, 4, 4, 0), n, "no past pages");
    check(sparse_of(16, 2, 4, 2, 5), n, "two-level");
    PipelineOptions forced = sparse_of(16, 4, 4, 3);
    forced.selection.sink_pages = 1;
    forced.selection.recent_pages = 1;
    check(forced, n, "sink and recent");
    forced.selection.sink_pages = 2;
    forced.selection.recent_pages = 5;  // more forced pages than the budget
    check(forced, n, "forced pages cut to the budget");
    PipelineOptions previous = sparse_of(16, 4, 4, 2);
    previous.selection.votes = attention::Votes::previous_tile;
    check(previous, n, "previous tile votes");
  }
}

TEST(Exactness, KeyBiasOfNorm900) {
  run(small_config(), options_of(16, 4, 4), 61, "dense, key bias 900", 900);
  run(small_config(), sparse_of(16, 4, 4, 2), 61, "top-k, key bias 900", 900);
}

std::vector<at::Tensor> gradients_of(const PipelineOptions& options, int64_t n, int64_t fast_bytes, double* loss) {
  const auto ids = random_ids(n, 13, 3);
  Rig rig(small_config(), options, kDouble, n, 9, fast_bytes);
  *loss = rig.pipeline.train(ids, shifted_labels(ids), 1.0).loss_sum;
  std::vector<at::Tensor> grads;
  for (const auto& p : rig.parameters.all()) grads.push_back(p.grad.clone());
  return grads;
}

TEST(Exactness, BudgetOfAllPagesEqualsDense) {
  double dense_loss = 0, sparse_loss = 0;
  const auto dense = gradients_of(options_of(16, 4, 4), 83, 0, &dense_loss);
  const auto sparse = gradients_of(sparse_of(16, 4, 4, 21), 83, 0, &sparse_loss);
  EXPECT_EQ(dense_loss, sparse_loss);
  for (size_t i = 0; i < dense.size(); ++i) EXPECT_TRUE(at::equal(dense[i], sparse[i])) << i;
}

TEST(Exactness, TiersChangeNoBit) {
  for (const PipelineOptions& options : {options_of(16, 4, 4), sparse_of(16, 4, 4, 2)}) {
    double reference_loss = 0;
    const auto reference = gradients_of(options, 83, /*fast_bytes=*/0, &reference_loss);
    for (const int64_t fast_bytes : {int64_t{1}, int64_t{9000}, int64_t{1} << 24}) {
      double loss = 0;
      const auto grads = gradients_of(options, 83, fast_bytes, &loss);
      EXPECT_EQ(loss, reference_loss);
      for (size_t i = 0; i < grads.size(); ++i)
        EXPECT_TRUE(at::equal(grads[i], reference[i])) << fast_bytes << ", " << i;
    }
  }
}

TEST(Exactness, KeptActivationsChangeNoBit) {
  for (PipelineOptions options : {options_of(16, 4, 4), sparse_of(16, 4, 4, 2)}) {
    double reference_loss = 0;
    const auto reference = gradients_of(options, 83, 0, &reference_loss);
    for (const KeptActivations level : kAllLevels) {
      for (const auto& [kept, whole] : {std::pair<int64_t, int64_t>{0, 0}, {1, 0}, {2, 2}, {5, 1}, {6, 0}, {100, 3}}) {
        options.activations = {level, whole, kept};
        double loss = 0;
        const auto grads = gradients_of(options, 83, 0, &loss);
        EXPECT_EQ(loss, reference_loss);
        for (size_t i = 0; i < grads.size(); ++i) {
          EXPECT_TRUE(at::equal(grads[i], reference[i]))
              << name_of(level) << ", " << kept << ", " << whole << ", " << i;
        }
      }
    }
  }
}

TEST(Exactness, ActivationsInHostMemoryChangeNoBit) {
  for (PipelineOptions options : {options_of(16, 4, 4), sparse_of(16, 4, 4, 2)}) {
    double reference_loss = 0;
    const auto reference = gradients_of(options, 83, 0, &reference_loss);
    for (const auto& [kept, host] : {std::pair<int64_t, int64_t>{1, 5}, {1, 2}, {3, 1}, {2, 100}}) {
      options.activations = {KeptActivations::all, 0, kept, host};
      double loss = 0;
      const auto grads = gradients_of(options, 83, 0, &loss);
      EXPECT_EQ(loss, reference_loss);
      for (size_t i = 0; i < grads.size(); ++i) {
        EXPECT_TRUE(at::equal(grads[i], reference[i])) << kept << ", " << host << ", " << i;
      }
    }
  }
}

TEST(Exactness, FiniteDifferences) {
  const auto options = sparse_of(16, 4, 4, 2);
  const auto ids = random_ids(53, 13, 3);
  const auto labels = shifted_labels(ids);
  Rig rig(small_config(), options, kDouble, 53, 9);
  rig.pipeline.train(ids, labels, 1.0);
  std::mt19937_64 rng(11);
  for (model::Parameter& p : rig.parameters.all()) {
    const auto i = static_cast<int64_t>(rng() % static_cast<uint64_t>(p.weight.numel()));
    double* w = p.weight.data_ptr<double>() + i;
    const double value = *w, h = 1e-6;
    *w = value + h;
    const double above = rig.pipeline.evaluate(ids, labels, /*as_trained=*/true).loss_sum;
    *w = value - h;
    const double below = rig.pipeline.evaluate(ids, labels, /*as_trained=*/true).loss_sum;
    *w = value;
    const double expected = (above - below) / (2 * h), got = p.grad.flatten()[i].item<double>();
    EXPECT_NEAR(got, expected, 1e-6 * std::max(1.0, std::abs(expected))) << p.name << "[" << i << "]";
  }
}

TEST(Exactness, OneTokenHasNoLabelAndNoGradient) {
  Rig rig(small_config(), options_of(8, 4, 4), kDouble, 1, 5);
  const SequenceLoss loss = rig.pipeline.train(std::vector<int64_t>{3}, std::vector<int64_t>{-100}, 1.0);
  EXPECT_EQ(loss.loss_sum, 0.0);
  EXPECT_EQ(loss.num_labels, 0);
  for (const auto& p : rig.parameters.all()) EXPECT_EQ(p.grad.abs().max().item<double>(), 0.0) << p.name;
}

// Logits of a sequence in evaluation order, [N, V].
at::Tensor logits_of(Rig& rig, const std::vector<int64_t>& ids, bool as_trained) {
  std::vector<at::Tensor> parts;
  PipelineObserver observer;
  observer.on_logits = [&](int64_t, const at::Tensor& logits) { parts.push_back(logits.clone()); };
  rig.pipeline.set_observer(observer);
  rig.pipeline.evaluate(ids, shifted_labels(ids), as_trained);
  return at::cat(parts, 0);
}

// First row of logits that changes when token `position` changes.
int64_t first_changed_row(const PipelineOptions& options, bool as_trained, int64_t position, int64_t n) {
  Rig rig(small_config(), options, kDouble, n, 21);
  auto ids = random_ids(n, 13, 4);
  const at::Tensor before = logits_of(rig, ids, as_trained);
  ids[static_cast<size_t>(position)] = (ids[static_cast<size_t>(position)] + 5) % 13;
  const at::Tensor after = logits_of(rig, ids, as_trained);
  for (int64_t row = 0; row < n; ++row) {
    if (!at::equal(before[row], after[row])) return row;
  }
  return n;
}

TEST(Causality, NoEarlierLogitChanges) {
  const int64_t n = 80;
  auto previous = sparse_of(16, 4, 4, 2);
  previous.selection.votes = attention::Votes::previous_tile;
  for (const int64_t position : {5, 37, 50, 64, 79}) {
    EXPECT_GE(first_changed_row(options_of(16, 4, 4), true, position, n), position) << "dense";
    EXPECT_GE(first_changed_row(previous, true, position, n), position) << "previous_tile";
    EXPECT_GE(first_changed_row(sparse_of(16, 4, 4, 2), false, position, n), position) << "evaluation of top-k";
    EXPECT_GE(first_changed_row(sparse_of(16, 2, 4, 2, 5), false, position, n), position) << "evaluation of two-level";
  }
}

TEST(Causality, ThePapersRuleReachesBackLessThanATile) {
  const int64_t n = 96, tile = 8, chunk = 16;
  bool reached_back = false;
  for (int64_t position = 48; position < n; ++position) {
    const int64_t row = first_changed_row(sparse_of(chunk, 4, tile, 1), true, position, n);
    EXPECT_GE(row, position / tile * tile);
    EXPECT_GE(row, position - (tile - 1));
    reached_back = reached_back || row < position;
    EXPECT_GE(first_changed_row(sparse_of(chunk, 4, 4, 1, 3), true, position, n), position / chunk * chunk);
  }
  EXPECT_TRUE(reached_back) << "the case does not show what it is about";
}

TEST(Precision, KvGradientSlotsAndSinglePrecision) {
  // fp32 compute against the double oracle: bounded by its rounding, far below what a missing term would give.
  const auto ids = random_ids(83, 13, 3);
  const auto labels = shifted_labels(ids);
  PipelineOptions options = options_of(16, 4, 4);
  options.gradient_dtype = at::kFloat;
  Rig rig(small_config(), options, TensorTypes{at::kFloat, at::Device(at::kCPU)}, 83, 9);
  const SequenceLoss loss = rig.pipeline.train(ids, labels, 1.0);
  const OracleResult oracle = full_sequence_autograd(rig.parameters, options, ids, labels, 1.0);
  EXPECT_NEAR(loss.loss_sum, oracle.loss_sum, 1e-5 * oracle.loss_sum);
  compare_gradients(rig.parameters, oracle, 2e-5, "fp32");
}

}  // namespace
}  // namespace oomb::test
