// Token embedding and its segment-sum gradient.
#include <algorithm>
#include <map>

#include "kernels/embedding.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint64_t kSeed = 83;

class EmbeddingTest : public DeviceTest {};

struct Shape {
  int64_t tokens, hidden, vocab, shift;
};
const Shape kShapes[] = {{1, 1, 1, 0},   {7, 5, 3, 0},     {301, 64, 256, 0}, {50, 3584, 17, 0},
                         {9, 24, 11, 1}, {33, 1031, 7, 0}, {4096, 16, 5, 0},  {5, 9000, 40, 0}};

std::vector<int64_t> token_ids(const Shape& s) {
  std::mt19937_64 engine(kSeed);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < s.tokens; ++i) ids.push_back(static_cast<int64_t>(engine() % static_cast<uint64_t>(s.vocab)));
  ids.back() = s.vocab - 1;
  return ids;
}

struct Segments {
  std::vector<int64_t> ids, begin{0}, order;
  explicit Segments(const std::vector<int64_t>& tokens) {
    std::map<int64_t, std::vector<int64_t>> rows;
    for (size_t i = 0; i < tokens.size(); ++i) rows[tokens[i]].push_back(static_cast<int64_t>(i));
    for (const auto& [id, list] : rows) {
      ids.push_back(id);
      order.insert(order.end(), list.begin(), list.end());
      begin.push_back(static_cast<int64_t>(order.size()));
    }
  }
};

TEST_P(EmbeddingTest, Forward) {
  for (const DType type : kAllTypes) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " tokens " << s.tokens << " hidden " << s.hidden);
      const auto rows = rounded_values(normal_values(s.vocab * s.hidden, kSeed), type);
      const auto ids = token_ids(s);
      const Buffer table = input(type, rows, s.shift), y = output(type, s.tokens * s.hidden, s.shift);
      const auto id_items = items(ids);
      ASSERT_OK(
          embedding_forward(queue(), {s.tokens, s.hidden, s.vocab, type, id_items.data(), table.data(), y.data()}));
      std::vector<double> expected;
      for (const int64_t id : ids) {
        expected.insert(expected.end(), rows.begin() + id * s.hidden, rows.begin() + (id + 1) * s.hidden);
      }
      EXPECT_NEAR_ALL(y.read(), expected, 0, 0);
    }
  }
}

TEST_P(EmbeddingTest, BackwardAddsTheRowsOfEachId) {
  for (const DType type : kAllTypes) {
    const DType acc = accumulator_of(type);
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << " tokens " << s.tokens << " hidden " << s.hidden);
      const auto dys = rounded_values(normal_values(s.tokens * s.hidden, kSeed), type);
      const auto before = rounded_values(normal_values(s.vocab * s.hidden, kSeed + 1), acc);
      const auto ids = token_ids(s);
      const Segments segments(ids);
      const Buffer dy = input(type, dys, s.shift), dtable = input(acc, before, s.shift);
      const auto segment_ids = items(segments.ids), begin = items(segments.begin), order = items(segments.order);
      ASSERT_OK(
          embedding_backward(queue(), {static_cast<int64_t>(segments.ids.size()), s.hidden, s.vocab, type,
                                       segment_ids.data(), begin.data(), order.data(), dy.data(), dtable.data()}));
      auto expected = before;
      for (size_t i = 0; i < ids.size(); ++i) {
        for (int64_t j = 0; j < s.hidden; ++j) {
          const double v = dys[i * static_cast<size_t>(s.hidden) + static_cast<size_t>(j)];
          expected[static_cast<size_t>(ids[i] * s.hidden + j)] += v;
        }
      }
      // n normal values: partial sums up to about 4 sqrt(n), each rounded, and the n errors grow like sqrt(n).
      double longest = 0;
      for (size_t i = 0; i + 1 < segments.begin.size(); ++i) {
        longest = std::max(longest, static_cast<double>(segments.begin[i + 1] - segments.begin[i]));
      }
      EXPECT_NEAR_ALL(dtable.read(), expected, (8 + 2 * longest) * unit_roundoff(acc), 2 * unit_roundoff(acc));
    }
  }
}

TEST_P(EmbeddingTest, BackwardLosesNoBf16Bits) {
  // 256 then 1 is 257, and 1,024 ones are 1,024: bf16 sums would stop at 256.
  const int64_t n = 1024;
  std::vector<int64_t> order;
  for (int64_t i = 0; i < n; ++i) order.push_back(i);
  const Buffer ones = input(DType::bf16, std::vector<double>(static_cast<size_t>(n) * 8, 1.0));
  const Buffer dtable = input(DType::f32, std::vector<double>(8, 0.0));
  const auto ids = items<int64_t>({0}), begin = items<int64_t>({0, n}), rows = items(order);
  ASSERT_OK(embedding_backward(
      queue(), {1, 8, 1, DType::bf16, ids.data(), begin.data(), rows.data(), ones.data(), dtable.data()}));
  EXPECT_NEAR_ALL(dtable.read(), std::vector<double>(8, 1024.0), 0, 0);

  const Buffer steps = input(DType::bf16, {256, 1}), slot = input(DType::f32, {0});
  const auto one_begin = items<int64_t>({0, 1}), first = items<int64_t>({0}), second = items<int64_t>({1});
  ASSERT_OK(embedding_backward(
      queue(), {1, 1, 1, DType::bf16, ids.data(), one_begin.data(), first.data(), steps.data(), slot.data()}));
  ASSERT_OK(embedding_backward(
      queue(), {1, 1, 1, DType::bf16, ids.data(), one_begin.data(), second.data(), steps.data(), slot.data()}));
  EXPECT_EQ(slot.read()[0], 257);
}

TEST_P(EmbeddingTest, IdOutsideTheVocabulary) {
  for (const int64_t bad : {int64_t{2}, int64_t{-1}}) {
    const Buffer table = input(DType::f32, {1, 2, 3, 4}), y = output(DType::f32, 4);
    const auto ids = items<int64_t>({1, bad});
    const Status status = embedding_forward(queue(), {2, 2, 2, DType::f32, ids.data(), table.data(), y.data()});
    if (device() == Device::cpu) {
      EXPECT_EQ(status.code, Code::invalid_argument);
      continue;
    }
    EXPECT_OK(status);
    const auto out = y.read();
    EXPECT_EQ(out[0], 3);
    EXPECT_TRUE(std::isnan(out[2]) && std::isnan(out[3]));
  }
}

OOMB_ON_ALL_DEVICES(EmbeddingTest);

}  // namespace
}  // namespace oomb::kernels::testing
