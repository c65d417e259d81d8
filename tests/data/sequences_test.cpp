#include "worker/data/sequences.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "tests/data/test_files.h"
#include "worker/data/counter_rng.h"

namespace oomb::data {
namespace {

using test::error_of;
using test::expect_mentions;

std::shared_ptr<const TokenStream> counting(int64_t size) {
  std::vector<int64_t> ids(static_cast<size_t>(size));
  std::iota(ids.begin(), ids.end(), 0);
  return make_stream(std::move(ids));
}

std::vector<int64_t> sequence(const SequenceSource& source, int64_t index) {
  std::vector<int64_t> ids(static_cast<size_t>(source.sequence_length()), -7);
  source.get(index, ids);
  return ids;
}

// Known answers published with the generator (kat_vectors of Random123).
TEST(CounterRng, KnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Permutation, IsABijectionForEverySize) {
  for (uint64_t size = 1; size <= 300; ++size) {
    const Permutation permute(size, 17, size);
    std::set<uint64_t> images;
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t image = permute(i);
      ASSERT_LT(image, size);
      images.insert(image);
    }
    ASSERT_EQ(images.size(), size);
  }
}

TEST(Permutation, MixesAndDependsOnItsKey) {
  constexpr uint64_t kSize = 10007;
  const Permutation a(kSize, 1, 0), b(kSize, 1, 1), c(kSize, 2, 0), again(kSize, 1, 0);
  int64_t fixed = 0, same_b = 0, same_c = 0, in_order = 0;
  for (uint64_t i = 0; i < kSize; ++i) {
    fixed += a(i) == i;
    same_b += a(i) == b(i);
    same_c += a(i) == c(i);
    in_order += i + 1 < kSize && a(i) + 1 == a(i + 1);
    ASSERT_EQ(a(i), again(i));
  }
  // Each count is about Poisson(1) for random permutations.
  EXPECT_LT(fixed, 10);
  EXPECT_LT(same_b, 10);
  EXPECT_LT(same_c, 10);
  EXPECT_LT(in_order, 10);
}

// Ids 1..8 cut in 1, 2 or 4 pieces: 7 valid labels each time, the ones at the borders included.
TEST(Labels, ShiftedBeforeCutting) {
  const std::vector<int64_t> ids{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int64_t> labels(8, -7);
  make_labels(ids, labels);
  EXPECT_EQ(labels, (std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, -100}));
  for (const size_t pieces : {1, 2, 4, 8}) {
    const size_t length = 8 / pieces;
    int64_t valid = 0;
    for (size_t p = 0; p < pieces; ++p) {
      const auto piece = std::span(labels).subspan(p * length, length);
      valid += std::count_if(piece.begin(), piece.end(), [](int64_t label) { return label != kIgnoredLabel; });
      if (p + 1 < pieces) {
        EXPECT_EQ(piece.back(), ids[(p + 1) * length]);
      }
    }
    EXPECT_EQ(valid, 7) << pieces;
  }
  const std::vector<int64_t> rank0(labels.begin(), labels.begin() + 4), rank1(labels.begin() + 4, labels.end());
  EXPECT_EQ(rank0, (std::vector<int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(rank1, (std::vector<int64_t>{6, 7, 8, -100}));
}

TEST(Labels, OneTokenHasNone) {
  std::vector<int64_t> labels(1, -7);
  make_labels(std::vector<int64_t>{5}, labels);
  EXPECT_EQ(labels, std::vector<int64_t>{kIgnoredLabel});
  make_labels({}, {});
  EXPECT_THROW(make_labels(std::vector<int64_t>{1, 2}, labels), std::logic_error);
}

TEST(Windows, EachEpochCoversTheTrainingPartOnce) {
  for (const int64_t length : {1, 2, 7, 31, 90}) {
    const auto source = make_windows(counting(101), {.sequence_length = length, .held_out_fraction = 0.1, .seed = 3});
    const int64_t train = 91;  // the last round(10.1) = 10 tokens are held out
    const int64_t count = train / length;
    ASSERT_EQ(source->num_sequences(), count);
    std::set<int64_t> offsets;
    for (int64_t epoch = 0; epoch < 4; ++epoch) {
      std::set<int64_t> starts;
      for (int64_t i = 0; i < count; ++i) {
        const auto ids = sequence(*source, epoch * count + i);
        for (size_t t = 1; t < ids.size(); ++t) ASSERT_EQ(ids[t], ids[0] + static_cast<int64_t>(t));
        ASSERT_GE(ids.front(), 0);
        ASSERT_LT(ids.back(), train) << "a training window touches held-out tokens";
        starts.insert(ids.front());
      }
      ASSERT_EQ(static_cast<int64_t>(starts.size()), count);
      ASSERT_EQ(*starts.rbegin() - *starts.begin(), (count - 1) * length) << "windows overlap or leave gaps";
      offsets.insert(*starts.begin());
    }
    if (train % length == 0) {
      EXPECT_EQ(offsets.size(), 1u);
    }
  }
}

TEST(Windows, OrderDependsOnSeedAndEpochOnly) {
  const auto stream = counting(1009);
  const auto order = [&](uint64_t seed, int64_t epoch) {
    const auto source = make_windows(stream, {.sequence_length = 10, .seed = seed});
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < 100; ++i) starts.push_back(sequence(*source, epoch * 100 + i).front() / 10);
    return starts;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 0), order(2, 0));
}

TEST(Windows, HeldOutIsTheTailInOrder) {
  const auto source = make_windows(
      counting(100), {.sequence_length = 7, .split = Split::kHeldOut, .held_out_fraction = 0.25, .seed = 9});
  ASSERT_EQ(source->num_sequences(), 3);
  for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(sequence(*source, i).front(), 75 + 7 * (i % 3));
}

TEST(Windows, RefusesShortCorpora) {
  expect_mentions(error_of([] { make_windows(counting(9), {.sequence_length = 10}); }), {"9", "10"});
  expect_mentions(error_of([] {
                    make_windows(counting(100),
                                 {.sequence_length = 10, .split = Split::kHeldOut, .held_out_fraction = 0.05});
                  }),
                  {"held-out", "5", "100", "10"});
  expect_mentions(error_of([] { make_windows(counting(100), {.sequence_length = 96, .held_out_fraction = 0.05}); }),
                  {"training", "95", "96"});
  error_of([] { make_windows(counting(100), {.sequence_length = 0}); });
  error_of([] { make_windows(counting(100), {.sequence_length = 1, .held_out_fraction = 1.0}); });
  EXPECT_EQ(make_windows(counting(10), {.sequence_length = 10})->num_sequences(), 1);
}

TEST(CopyTask, SecondHalfRepeatsTheFirst) {
  for (const int64_t length : {2, 3, 16, 17, 101}) {
    const auto source = make_copy_task({.sequence_length = length, .alphabet = 11, .seed = 5});
    const int64_t half = (length + 1) / 2;
    for (const int64_t index : {0, 1, 999, 1000, 123456789}) {
      const auto ids = sequence(*source, index);
      EXPECT_EQ(ids, sequence(*source, index));
      for (int64_t i = 0; i < length; ++i) {
        const int64_t id = ids[static_cast<size_t>(i)];
        ASSERT_TRUE(id >= 0 && id < 11);
        if (i >= half) {
          ASSERT_EQ(id, ids[static_cast<size_t>(i - half)]);
        }
      }
    }
  }
}

TEST(CopyTask, IsKeyedBySeedSplitAndIndexAndUniform) {
  const CopyTaskOptions base{.sequence_length = 64, .alphabet = 1000, .seed = 5};
  auto other = base;
  other.seed = 6;
  auto held_out = base;
  held_out.split = Split::kHeldOut;
  const auto ids = sequence(*make_copy_task(base), 3);
  EXPECT_NE(ids, sequence(*make_copy_task(base), 4));
  EXPECT_NE(ids, sequence(*make_copy_task(other), 3));
  EXPECT_NE(ids, sequence(*make_copy_task(held_out), 3));
  std::map<int64_t, int64_t> counts;
  const auto coarse = make_copy_task({.sequence_length = 20000, .alphabet = 10, .seed = 1});
  const auto many = sequence(*coarse, 0);
  for (size_t i = 0; i < 10000; ++i) ++counts[many[i]];
  for (int64_t id = 0; id < 10; ++id) EXPECT_NEAR(static_cast<double>(counts[id]), 1000.0, 150.0);  // 5 sigma
}

TEST(CopyTask, CopyMustLieOutsideTheChunk) {
  EXPECT_NO_THROW(make_copy_task({.sequence_length = 2 * 65, .alphabet = 4, .chunk_tokens = 64}));
  expect_mentions(error_of([] { make_copy_task({.sequence_length = 128, .alphabet = 4, .chunk_tokens = 64}); }),
                  {"64"});
  error_of([] { make_copy_task({.sequence_length = 1, .alphabet = 4}); });
  error_of([] { make_copy_task({.sequence_length = 8, .alphabet = 1}); });
}

TEST(RandomIds, CoverTheVocabularyAndDependOnIndexAndSeed) {
  const auto source = make_random_ids(1009, 7, 1);
  EXPECT_EQ(source->sequence_length(), 1009);
  EXPECT_EQ(source->vocab_size_needed(), 7);
  const std::vector<int64_t> first = sequence(*source, 0);
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()), (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(sequence(*source, 0), first);
  EXPECT_NE(sequence(*source, 1), first);
  EXPECT_NE(sequence(*make_random_ids(1009, 7, 2), 0), first);
  EXPECT_EQ(sequence(*make_random_ids(1, 1, 5), 3), std::vector<int64_t>{0});
  expect_mentions(error_of([] { make_random_ids(0, 7, 1); }), {"random ids"});
}

}  // namespace
}  // namespace oomb::data
