// Pairwise collectives over threads: every operation against what it must give, and failures that name a rank.
#include <gtest/gtest.h>

#include <cstring>
#include <exception>
#include <functional>
#include <thread>

#include "comm/collectives/pairwise_collectives.h"
#include "comm/collectives/twin_point_to_point.h"
#include "tests/comm/collective_checks.h"

namespace oomb::comm {
namespace {

using Body = std::function<void(Collectives&)>;

// Runs `body` as each rank in a thread of its own; the first exception is thrown here.
void run_ranks(int size, const Body& body, const FailureWatch& watch = {}) {
  auto ends = make_twin_point_to_point(size);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto collectives = make_pairwise_collectives(std::move(ends[static_cast<std::size_t>(rank)]), watch);
        body(*collectives);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Collectives, GiveTheRightValuesAtAnySize) {
  for (const int size : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE("W=" + std::to_string(size));
    run_ranks(size, [](Collectives& collectives) { test::check_collectives(collectives, 60); });
  }
}

TEST(Collectives, PiecesBeyondTheScratch) {
  // A piece is a third of the scratch: 1,398,101 floats.
  run_ranks(3, [](Collectives& collectives) { test::check_large(collectives, 1400009, 60); });
}

TEST(Collectives, SumsDoNotDependOnTheOrderOfArrival) {
  // 2^24 + 1 - 2^24 + ...: any other order, or fp32 on the way, gives other bits.
  run_ranks(4, [](Collectives& collectives) {
    const float part[4] = {16777216.0f, 1.0f, -16777216.0f, 0.5f};
    for (int turn = 0; turn < 50; ++turn) {
      float value = part[collectives.rank()];
      if ((turn + collectives.rank()) % 4 == 0) std::this_thread::yield();
      collectives.all_reduce_sum(&value, 1, ElementType::kFloat32, in_seconds(60));
      ASSERT_EQ(value, 1.5f);
    }
  });
}

TEST(Collectives, WhatIsNotSummedIsRefused) {
  run_ranks(1, [](Collectives& collectives) {
    std::uint16_t value = 0;
    EXPECT_THROW(collectives.all_reduce_sum(&value, 1, ElementType::kBFloat16, in_seconds(1)), std::logic_error);
  });
  run_ranks(2, [](Collectives& collectives) {
    EXPECT_THROW(collectives.broadcast(nullptr, 0, ElementType::kByte, 2, in_seconds(1)), std::logic_error);
  });
}

TEST(Collectives, ADeadlineNamesTheRankThatIsMissing) {
  run_ranks(3, [](Collectives& collectives) {
    if (collectives.rank() == 1) return;  // never comes
    std::vector<float> values(30000, 1.0f);
    try {
      collectives.all_reduce_sum(values.data(), 30000, ElementType::kFloat32, in_seconds(0.2));
      ADD_FAILURE() << "rank 1 did not take part";
    } catch (const DeadlinePassed& error) {
      EXPECT_STREQ(error.what(), "the deadline passed while waiting for an all-reduce to receive from rank 1");
    }
    EXPECT_THROW(collectives.barrier(in_seconds(1)), Aborted) << "unusable after a failure";
  });
}

TEST(Collectives, AFailureKnownFromElsewhereEndsTheWait) {
  const Failure failure{Failure::Kind::kPeerLost, 1, "no sign of life for 2 s"};
  EXPECT_THROW(run_ranks(
                   2,
                   [](Collectives& collectives) {
                     if (collectives.rank() == 0) collectives.barrier(in_seconds(60));
                   },
                   [&] { return &failure; }),
               PeerLost);
}

TEST(Collectives, AbortFromAnotherThreadEndsTheWait) {
  auto ends = make_twin_point_to_point(2);
  const auto collectives = make_pairwise_collectives(std::move(ends[0]), {});
  std::thread other([&] { collectives->abort("the run ends"); });
  EXPECT_THROW(collectives->barrier(in_seconds(60)), Aborted);
  other.join();
  float one = 1;
  EXPECT_THROW(collectives->broadcast(&one, 0, ElementType::kFloat32, 0, in_seconds(60)), Aborted);
  EXPECT_THROW(collectives->barrier(in_seconds(60)), Aborted);
}

TEST(ElementType, EveryOneHasANameAndASize) {
  for (const auto type : {ElementType::kFloat32, ElementType::kFloat64, ElementType::kBFloat16, ElementType::kInt64,
                          ElementType::kByte}) {
    EXPECT_GT(bytes_of(type), 0);
    EXPECT_STRNE(name_of(type), "?");
  }
}

}  // namespace
}  // namespace oomb::comm
