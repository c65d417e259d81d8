// page_means, page_votes, page_topk against plain evaluations in double.
#include <algorithm>
#include <numeric>

#include "kernels/page_select.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

using Values = std::vector<double>;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
double at(const Values& v, int64_t i) { return v[static_cast<size_t>(i)]; }

/// cos and sin of positions 0, step, 2 step, ... with Qwen2.5's theta.
struct Angles {
  Values cos, sin;
  Angles(int64_t count, int64_t dim, int64_t step, DType acc) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < dim / 2; ++j) {
        const double angle =
            static_cast<double>(i * step) * std::pow(1e6, -2.0 * static_cast<double>(j) / static_cast<double>(dim));
        cos.push_back(rounded(std::cos(angle), acc));
        sin.push_back(rounded(std::sin(angle), acc));
      }
    }
  }
  /// Element j of R(i) x, with x at offset `from`.
  double rotated(int64_t i, const Values& x, int64_t from, int64_t dim, int64_t j) const {
    const int64_t half = dim / 2, angle = i * half + j % half;
    return j < half ? at(x, from + j) * at(cos, angle) - at(x, from + j + half) * at(sin, angle)
                    : at(x, from + j) * at(cos, angle) + at(x, from + j - half) * at(sin, angle);
  }
};

class PageSelectTest : public DeviceTest {
 protected:
  void check_means(int64_t tokens, int64_t heads, int64_t page_tokens, int64_t dim, DType type, double bias_norm);
};

void PageSelectTest::check_means(int64_t tokens, int64_t heads, int64_t page_tokens, int64_t dim, DType type,
                                 double bias_norm) {
  SCOPED_TRACE(::testing::Message() << name_of(type) << " tokens " << tokens << " Hkv " << heads << " P " << page_tokens
                                    << " D " << dim << " bias " << bias_norm);
  const DType acc = accumulator_of(type);
  const Angles angles(tokens, dim, 1, acc);
  const double each = bias_norm / std::sqrt(static_cast<double>(dim));
  const Values bias = rounded_values(normal_values(heads * dim, 61, each), acc);
  Values k = normal_values(heads * tokens * dim, 62);
  if (bias_norm > 0) {
    for (int64_t i = 0; i < heads * tokens * dim; ++i) {
      const int64_t j = i % dim, token = i / dim % tokens, head = i / dim / tokens;
      k[static_cast<size_t>(i)] += angles.rotated(token, bias, head * dim, dim, j);
    }
  }
  k = rounded_values(k, type);
  const int64_t pages = ceil_div(tokens, page_tokens);
  Values expected;
  for (int64_t page = 0; page < pages; ++page) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t j = 0; j < dim; ++j) {
        double sum = 0;
        const int64_t first = page * page_tokens, last = std::min(tokens, first + page_tokens);
        for (int64_t token = first; token < last; ++token) {
          sum += at(k, (head * tokens + token) * dim + j);
          if (bias_norm > 0) sum -= angles.rotated(token, bias, head * dim, dim, j);
        }
        expected.push_back(sum / static_cast<double>(last - first));
      }
    }
  }
  const Buffer k_in = input(type, k, tokens % 2), bias_in = input(acc, bias);
  const Buffer cos = input(acc, angles.cos), sin = input(acc, angles.sin);
  const Buffer means = output(type, pages * heads * dim);
  PageMeans op{tokens, heads, page_tokens, dim, type, k_in.data()};
  if (bias_norm > 0) op.bias = bias_in.data(), op.cos = cos.data(), op.sin = sin.data();
  op.means = means.data();
  ASSERT_OK(page_means(queue(), op));
  const double size = 4 + 4 * each;  // of K's elements
  EXPECT_NEAR_ALL(means.read(), expected, 8 * size * unit_roundoff(acc), unit_roundoff(type) + 8 * unit_roundoff(acc));
}

TEST_P(PageSelectTest, MeansOverValidTokensOnly) {
  for (const DType type : kAllTypes) {
    for (const double bias : {0.0, 3.0, 900.0}) {
      check_means(1, 1, 1, 2, type, bias);
      check_means(7, 3, 4, 6, type, bias);
      check_means(33, 2, 16, 34, type, bias);
      check_means(300, 2, 128, 128, type, bias);
      check_means(131, 1, 5, 264, type, bias);
    }
    check_means(29, 2, 8, 5, type, 0.0);  // an odd head dimension
  }
}

// K = R(p) bias + a constant vector: the mean is the constant, whatever the bias.
TEST_P(PageSelectTest, MeansDoNotCarryTheBias) {
  const int64_t tokens = 21, dim = 8, page_tokens = 8;
  const Angles angles(tokens, dim, 1, DType::f64);
  const Values bias = normal_values(dim, 63, 300.0);
  Values k;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t j = 0; j < dim; ++j) k.push_back(angles.rotated(token, bias, 0, dim, j) + static_cast<double>(j + 1));
  }
  const Buffer k_in = input(DType::f64, k), bias_in = input(DType::f64, bias), cos = input(DType::f64, angles.cos),
               sin = input(DType::f64, angles.sin), means = output(DType::f64, 3 * dim);
  ASSERT_OK(page_means(queue(), {tokens, 1, page_tokens, dim, DType::f64, k_in.data(), bias_in.data(), cos.data(),
                                 sin.data(), means.data()}));
  Values expected;
  for (int64_t i = 0; i < 3 * dim; ++i) expected.push_back(static_cast<double>(i % dim + 1));
  EXPECT_NEAR_ALL(means.read(), expected, 1e-11, 0);
}

// --- votes
// ------------------------------------------------------------------------------------------------------------

struct VotesCase {
  int64_t tokens, heads, group, dim, tile, pages;
  DType type;
  double bias_norm = 0, score_scale = 1, q_size = 0.4;
  bool shifted = false;  ///< addresses that are not aligned
  bool uneven = false;   ///< tokens, pages and dimensions of unlike size
};

/// Bias parts as trained models have them: large only where the rotation is slow.
Values slow_bias(int64_t heads, int64_t dim, double norm) {
  Values bias(static_cast<size_t>(heads * dim), 0.0);
  for (int64_t h = 0; h < heads; ++h) {
    bias[static_cast<size_t>(h * dim + dim / 2 - 1)] = norm * 0.8;
    bias[static_cast<size_t>(h * dim + dim - 1)] = -norm * 0.6;
    for (int64_t j = 0; j < dim; ++j)
      bias[static_cast<size_t>(h * dim + j)] += 0.1 * static_cast<double>((j * 7 + h) % 5 - 2);
  }
  return bias;
}

struct VotesData {
  Values q, means, bias, expected;
  Angles angles;

  void make_uneven(const VotesCase& c);
  explicit VotesData(const VotesCase& c)
      : q(rounded_values(normal_values(c.heads * c.tokens * c.group * c.dim, 71, c.q_size), c.type)),
        means(rounded_values(normal_values(c.pages * c.heads * c.dim, 72), c.type)),
        bias(rounded_values(slow_bias(c.heads, c.dim, c.bias_norm), accumulator_of(c.type))),
        angles(c.pages, c.dim, 128, accumulator_of(c.type)) {
    if (c.uneven) make_uneven(c);
    const int64_t tiles = ceil_div(c.tokens, c.tile);
    expected.assign(static_cast<size_t>(tiles * c.pages), 0.0);
    Values full(static_cast<size_t>(c.pages * c.dim)), scores(static_cast<size_t>(c.pages));
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t n = 0; n < c.pages; ++n) {
        for (int64_t j = 0; j < c.dim; ++j) {
          full[static_cast<size_t>(n * c.dim + j)] = at(means, (n * c.heads + h) * c.dim + j);
          if (c.bias_norm > 0) full[static_cast<size_t>(n * c.dim + j)] += angles.rotated(n, bias, h * c.dim, c.dim, j);
        }
      }
      for (int64_t token = 0; token < c.tokens; ++token) {
        Values sum(static_cast<size_t>(c.dim), 0.0);
        for (int64_t i = 0; i < c.group * c.dim; ++i) {
          sum[static_cast<size_t>(i % c.dim)] += at(q, (h * c.tokens + token) * c.group * c.dim + i);
        }
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t n = 0; n < c.pages; ++n) {
          const double* row = full.data() + n * c.dim;
          scores[static_cast<size_t>(n)] = c.score_scale * std::inner_product(sum.begin(), sum.end(), row, 0.0);
          top = std::max(top, at(scores, n));
        }
        for (double& s : scores) total += s = std::exp(s - top);
        double* to = expected.data() + token / c.tile * c.pages;
        for (int64_t n = 0; n < c.pages; ++n) to[n] += at(scores, n) / total;
      }
    }
  }
};

void VotesData::make_uneven(const VotesCase& c) {
  // Powers of two, so that values keep their type. A dimension that is large in the means is small in q.
  const auto outlier = [&](int64_t j) { return static_cast<int>(j % 3 - 1) * 5; };
  for (int64_t i = 0; i < c.heads * c.tokens * c.group * c.dim; ++i) {
    const int token = static_cast<int>(i / c.dim / c.group % c.tokens % 7);
    q[static_cast<size_t>(i)] = std::ldexp(at(q, i), -token - outlier(i % c.dim));
  }
  for (int64_t i = 0; i < c.pages * c.heads * c.dim; ++i) {
    const int page = static_cast<int>(i / c.dim / c.heads % 11);
    means[static_cast<size_t>(i)] = std::ldexp(at(means, i), -page + outlier(i % c.dim));
  }
}

class PageVotesTest : public DeviceTest {
 protected:
  Values votes_of(const VotesCase& c, const VotesData& data) {
    const DType acc = accumulator_of(c.type);
    const int64_t shift = c.shifted ? 1 : 0, tiles = ceil_div(c.tokens, c.tile);
    const Buffer q = input(c.type, data.q, shift), means = input(c.type, data.means, shift),
                 bias = input(acc, data.bias);
    const Buffer cos = input(acc, data.angles.cos), sin = input(acc, data.angles.sin);
    const Buffer votes = output(acc, tiles * c.pages);
    PageVotes op{c.tokens, c.heads, c.group, c.dim, c.tile, c.pages, c.type, c.score_scale, q.data(), means.data()};
    if (c.bias_norm > 0) op.bias_mean = bias.data(), op.page_cos = cos.data(), op.page_sin = sin.data();
    op.votes = votes.data();
    const Items<unsigned char> work = workspace(page_votes_workspace_bytes(queue(), op));
    op.workspace = work.data();
    EXPECT_OK(page_votes(queue(), op));
    const Values first = votes.read();
    EXPECT_OK(page_votes(queue(), op));
    EXPECT_EQ(votes.read(), first) << "two calls gave different bits";
    return first;
  }

  void check(const VotesCase& c) {
    SCOPED_TRACE(::testing::Message() << name_of(c.type) << " C " << c.tokens << " Hkv " << c.heads << " G " << c.group
                                      << " D " << c.dim << " T " << c.tile << " pages " << c.pages << " bias "
                                      << c.bias_norm << " shifted " << c.shifted << " uneven " << c.uneven);
    const VotesData data(c);
    const Values votes = votes_of(c, data);
    // A vote is a sum of exp(score - lse): its relative error is the absolute error of the scores (up to 50 here).
    const double relative = c.type == DType::f64 ? 1e-12 : 1e-5;
    EXPECT_NEAR_ALL(votes, data.expected, c.type == DType::f64 ? 1e-14 : 1e-9, relative);
    for (int64_t tile = 0; tile < ceil_div(c.tokens, c.tile); ++tile) {
      const double sum = std::accumulate(votes.begin() + tile * c.pages, votes.begin() + (tile + 1) * c.pages, 0.0);
      const double voters = static_cast<double>(c.heads * std::min(c.tile, c.tokens - tile * c.tile));
      EXPECT_NEAR(sum, voters, voters * (c.type == DType::f64 ? 1e-12 : 1e-5));  // each token and head has one vote
    }
  }
};

TEST_P(PageVotesTest, AgainstPlainSoftmax) {
  for (const DType type : kAllTypes) {
    for (const double bias : {0.0, 2.0}) {
      check({1, 1, 1, 2, 1, 1, type, bias});
      check({1, 2, 7, 128, 128, 131, type, bias});
      check({7, 2, 3, 6, 4, 5, type, bias});
      check({33, 1, 7, 64, 16, 129, type, bias});
      check({130, 2, 2, 128, 64, 300, type, bias});
      check({200, 2, 1, 72, 200, 257, type, bias});
      check({97, 1, 1, 24, 32, 1, type, bias});
      check({259, 4, 7, 128, 128, 640, type, bias, 0.25, 1.0});
      check({65, 2, 2, 200, 64, 129, type, bias, 0.5});
      check({40, 1, 2, 264, 32, 70, type, bias, 0.5});
      check({70, 2, 3, 40, 64, 67, type, bias, 1, 0.4, true});
      check({131, 2, 3, 128, 64, 259, type, bias, 1, 0.4, false, true});
      check({131, 2, 3, 192, 64, 259, type, bias, -0.25e20, 1e-20, false, true});
    }
    check({37, 2, 2, 5, 16, 41, type});  // an odd head dimension
  }
}

/// Pages of the budget with most votes; ties to the lower page.
std::vector<int32_t> best_pages(const double* votes, int64_t pages, int64_t budget) {
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return votes[x] > votes[y]; });
  order.resize(static_cast<size_t>(budget));
  return order;
}

// With a key bias of norm 900 the chosen pages are those of exact arithmetic, up to pages within 1e-5 of the last one.
TEST_P(PageVotesTest, SelectionWithLargeKeyBias) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const double bias : {0.0, 900.0}) {
      const VotesCase c{256, 2, 7, 128, 128, 2000, type, bias, 1, 0.35};
      const int64_t budget = 64;
      const VotesData data(c);
      const Values votes = votes_of(c, data);
      for (int64_t tile = 0; tile < 2; ++tile) {
        const double* exact = data.expected.data() + tile * c.pages;
        const std::vector<int32_t> right = best_pages(exact, c.pages, budget);
        const double last = exact[right.back()];
        double worst = 0;
        for (const int32_t page : best_pages(votes.data() + tile * c.pages, c.pages, budget)) {
          if (std::find(right.begin(), right.end(), page) == right.end()) {
            worst = std::max(worst, (last - exact[page]) / last);
          }
        }
        EXPECT_LE(worst, 1e-5) << name_of(type) << " bias " << bias << " tile " << tile;
      }
    }
  }
}

// Qwen2.5-7B's shape with the pages of 512K tokens (a quarter of the chunk on a GPU, a sliver on the CPU).
TEST_P(PageVotesTest, ManyPages) {
  const int64_t tokens = device() == Device::cpu ? 48 : 513;
  check({tokens, 4, 7, 128, 128, 4099, DType::bf16, 0, 1, 0.3});
}

TEST_P(PageVotesTest, BadArgumentsAreRefused) {
  const Buffer x = input(DType::f32, Values(8, 1.0));
  PageVotes op{1, 1, 1, 3, 1, 2, DType::f32, 1.0, x.data(), x.data()};
  op.votes = x.data();
  EXPECT_EQ(page_votes(queue(), op).code, Code::invalid_argument) << "no workspace";
  op.workspace = static_cast<char*>(x.data()) + 4;
  EXPECT_EQ(page_votes(queue(), op).code, Code::invalid_argument) << "workspace not aligned";
  op.workspace = x.data();
  op.bias_mean = op.page_cos = op.page_sin = x.data();
  EXPECT_EQ(page_votes(queue(), op).code, Code::invalid_argument) << "bias with an odd head dimension";
}

OOMB_ON_ALL_DEVICES(PageSelectTest);
OOMB_ON_ALL_DEVICES(PageVotesTest);

// --- top-k
// ------------------------------------------------------------------------------------------------------------

class PageTopKTest : public DeviceTest {
 protected:
  std::vector<int32_t> top_k(const Values& votes, int64_t rows, int64_t budget, int64_t sink, int64_t recent, DType acc,
                             const std::vector<int32_t>& candidates = {}) {
    const int64_t pages = static_cast<int64_t>(votes.size()) / rows;
    const Buffer in = input(acc, votes);
    const Items<int32_t> candidates_in = items(candidates);
    const Items<int32_t> out = items(std::vector<int32_t>(static_cast<size_t>(rows * budget), -7));
    PageTopK op{rows, pages, budget, sink, recent, acc, in.data()};
    if (!candidates.empty()) {
      op.candidates = candidates_in.data();
      op.num_candidates = static_cast<int64_t>(candidates.size());
    }
    op.pages = out.data();
    const Items<unsigned char> work = workspace(page_topk_workspace_bytes(queue(), op));
    op.workspace = work.data();
    EXPECT_OK(page_topk(queue(), op));
    return out.read();
  }

  void check(const Values& votes, int64_t rows, int64_t budget, int64_t sink, int64_t recent, DType acc,
             std::vector<int32_t> candidates = {}) {
    SCOPED_TRACE(::testing::Message() << rows << " rows of " << votes.size() / static_cast<size_t>(rows) << " budget "
                                      << budget << " sink " << sink << " recent " << recent << " candidates "
                                      << candidates.size() << " " << name_of(acc));
    const int64_t pages = static_cast<int64_t>(votes.size()) / rows;
    const std::vector<int32_t> actual = top_k(votes, rows, budget, sink, recent, acc, candidates);
    if (candidates.empty()) {
      candidates.resize(static_cast<size_t>(pages));
      std::iota(candidates.begin(), candidates.end(), 0);
    }
    std::vector<int32_t> expected;
    for (int64_t row = 0; row < rows; ++row) {
      const double* v = votes.data() + row * pages;
      std::vector<int32_t> order;  // sinks, then recent pages from the newest, then by vote
      const auto take = [&](int32_t page) {
        if (std::find(order.begin(), order.end(), page) == order.end()) order.push_back(page);
      };
      const int64_t n = static_cast<int64_t>(candidates.size());
      for (int64_t c = 0; c < std::min(sink, n); ++c) take(candidates[static_cast<size_t>(c)]);
      for (int64_t c = 0; c < std::min(recent, n); ++c) take(candidates[static_cast<size_t>(n - 1 - c)]);
      std::vector<int32_t> by_vote = candidates;
      const auto key = [&](int32_t page) {
        return std::isnan(v[page]) ? std::make_pair(0, 0.0) : std::make_pair(1, v[page]);
      };
      std::stable_sort(by_vote.begin(), by_vote.end(), [&](int32_t x, int32_t y) { return key(x) > key(y); });
      for (const int32_t page : by_vote) {
        if (static_cast<int64_t>(order.size()) >= budget) break;
        take(page);
      }
      order.resize(static_cast<size_t>(budget));
      std::sort(order.begin(), order.end());
      expected.insert(expected.end(), order.begin(), order.end());
    }
    EXPECT_EQ(actual, expected);
  }
};

/// Few distinct values: many ties.
Values coarse_votes(int64_t n, uint64_t seed) {
  Values votes = normal_values(n, seed, 2.0);
  for (double& v : votes) v = std::fabs(std::nearbyint(v)) / 4;
  return votes;
}

TEST_P(PageTopKTest, TiesGoToTheLowerPage) {
  EXPECT_EQ(top_k({1, 2, 2, 2, 1}, 1, 2, 0, 0, DType::f32), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(top_k({0, 0, 0, 0, 0}, 1, 3, 0, 0, DType::f32), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(top_k({-0.0, 0.0, -0.0, 0.0, -1}, 1, 2, 0, 0, DType::f64), (std::vector<int32_t>{0, 1}));
}

TEST_P(PageTopKTest, ForcedPagesCountInTheBudget) {
  const Values votes{9, 1, 8, 2, 7, 3};
  EXPECT_EQ(top_k(votes, 1, 3, 1, 1, DType::f32), (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(top_k(votes, 1, 2, 1, 3, DType::f32), (std::vector<int32_t>{0, 5}));  // cut: sink first, newest recent
  EXPECT_EQ(top_k(votes, 1, 2, 4, 3, DType::f32), (std::vector<int32_t>{0, 1}));  // cut to the sinks
  EXPECT_EQ(top_k(votes, 1, 5, 4, 4, DType::f32), (std::vector<int32_t>{0, 1, 2, 3, 5}));
  EXPECT_EQ(top_k(votes, 1, 6, 9, 9, DType::f32), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));  // budget >= pages: all
}

TEST_P(PageTopKTest, AgainstSorting) {
  for (const DType acc : {DType::f32, DType::f64}) {
    for (const int64_t pages : {1, 2, 31, 64, 1023, 1024, 1025, 4099}) {
      for (const int64_t budget : {int64_t{1}, int64_t{2}, int64_t{7}, pages / 2, pages - 1, pages}) {
        if (budget < 1 || budget > pages) continue;
        check(rounded_values(normal_values(3 * pages, 81), acc), 3, budget, 0, 0, acc);
        check(coarse_votes(3 * pages, 82), 3, budget, 1, 2, acc);
      }
    }
  }
}

TEST_P(PageTopKTest, Candidates) {
  const int64_t pages = 301;
  std::vector<int32_t> candidates;
  for (int32_t page = 3; page < pages; page += 1 + page % 4) candidates.push_back(page);
  const int64_t count = static_cast<int64_t>(candidates.size());
  for (const int64_t budget : {int64_t{1}, int64_t{17}, count - 1, count}) {
    check(coarse_votes(5 * pages, 83), 5, budget, 2, 3, DType::f32, candidates);
    check(normal_values(5 * pages, 84), 5, budget, 0, 0, DType::f64, candidates);
  }
}

// Doubles that are equal in all but the last bits, votes without a number, infinities, all-equal rows.
TEST_P(PageTopKTest, HardKeys) {
  Values close;
  for (int64_t i = 0; i < 2000; ++i) close.push_back(1.0 + static_cast<double>(i * 7919 % 2000) * std::ldexp(1.0, -52));
  check(close, 1, 37, 0, 0, DType::f64);
  Values special = normal_values(500, 85);
  special[3] = special[77] = std::nan("");
  special[5] = std::numeric_limits<double>::infinity();
  special[9] = -std::numeric_limits<double>::infinity();
  for (const int64_t budget : {1, 250, 497, 498, 499}) check(special, 1, budget, 0, 0, DType::f64);
  check(Values(3000, 0.25), 2, 700, 0, 0, DType::f32);
}

TEST_P(PageTopKTest, ManyPagesAndRows) {
  check(rounded_values(normal_values(3 * 32771, 86), DType::f32), 3, 64, 1, 2, DType::f32);
  check(coarse_votes(2 * 65537, 87), 2, 256, 1, 2, DType::f32);
  check(coarse_votes(4097 * 66, 88), 4097, 64, 1, 1, DType::f32);
}

TEST_P(PageTopKTest, BadArgumentsAreRefused) {
  const Buffer votes = input(DType::f32, Values(8, 1.0));
  const Items<int32_t> pages = items(std::vector<int32_t>(8));
  PageTopK op{1, 4, 5, 0, 0, DType::f32, votes.data()};
  op.pages = pages.data();
  op.workspace = votes.data();
  EXPECT_EQ(page_topk(queue(), op).code, Code::invalid_argument) << "budget above the number of pages";
  op.budget = 0;
  EXPECT_EQ(page_topk(queue(), op).code, Code::invalid_argument) << "no budget";
  op.budget = 1;
  op.candidates = pages.data();
  EXPECT_EQ(page_topk(queue(), op).code, Code::invalid_argument) << "no candidates";
}

OOMB_ON_ALL_DEVICES(PageTopKTest);

}  // namespace
}  // namespace oomb::kernels::testing
