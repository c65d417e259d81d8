// The page exchange over the in-memory twin: random schedules, faults, and reads of freed memory.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/exchange/link_measurement.h"
#include "comm/exchange/page_exchange.h"
#include "comm/exchange/twin_network.h"
#include "comm/exchange/wire.h"
#include "tests/comm/toy_step.h"

namespace oomb::comm {
namespace {

using test::run_toy_steps;
using test::ToyMemory;
using test::ToyOptions;
using test::ToyResult;

struct Outcome {
  ToyResult result;
  std::exception_ptr error;
};

// One thread per worker; returns what each of them got or threw. Memory lives in `memory` until the network is gone.
std::vector<Outcome> run_workers(TwinNetwork& network, int workers, const ToyOptions& options,
                                 std::vector<ToyMemory>* memory) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(workers));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      try {
        outcome.result = run_toy_steps(network.transport(rank), options, &(*memory)[static_cast<std::size_t>(rank)]);
      } catch (...) {
        outcome.error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

// Messages and bytes that the headers promise, against what was counted.
void expect_traffic(TwinNetwork& network, int workers, const ToyOptions& options,
                    const std::vector<Outcome>& outcomes) {
  Traffic::Count means, markers, notes, acks, got;
  for (int rank = 0; rank < workers; ++rank) {
    for (const Traffic::Peer& peer : network.transport(rank).traffic().peers) {
      const auto add = [](Traffic::Count& sum, const Traffic::Count& count) {
        sum.messages += count.messages;
        sum.bytes += count.bytes;
      };
      add(means, peer.sent[static_cast<int>(MessageKind::kMeans)]);
      add(markers, peer.sent[static_cast<int>(MessageKind::kMarker)]);
      add(notes, peer.sent[static_cast<int>(MessageKind::kContribution)]);
      add(acks, peer.sent[static_cast<int>(MessageKind::kAck)]);
      add(got, peer.got);
    }
  }
  std::int64_t chunks = 0, pages = 0, earlier = 0;  // over all sequences
  for (int sequence = 0; sequence < options.sequences_per_step; ++sequence) {
    SequenceShape shape;
    shape.num_pages = options.num_pages - sequence;
    shape.pages_per_chunk = options.pages_per_chunk;
    chunks += shape.num_chunks();
    pages += shape.num_pages;
    for (std::int64_t from = 0; from < shape.num_chunks(); ++from) {
      for (std::int64_t target = 0; target < from; ++target) earlier += (from - target) % workers != 0;
    }
  }
  ToyResult all;
  for (const Outcome& outcome : outcomes) {
    all.pages_read += outcome.result.pages_read;
    all.pages_contributed += outcome.result.pages_contributed;
    all.notes += outcome.result.notes;
  }
  const std::int64_t times = options.num_layers * options.num_steps;
  EXPECT_EQ(means.messages, times * chunks * (workers - 1));
  EXPECT_EQ(means.bytes, times * (workers - 1) * (chunks * 28 + pages * (12 + 8)));
  EXPECT_EQ(markers.messages, times * chunks * (workers - 1));
  EXPECT_EQ(markers.bytes, times * (chunks * (workers - 1) * 28 + earlier * 8));
  EXPECT_EQ(notes.messages, all.notes);
  EXPECT_EQ(notes.bytes, all.notes * 40 + all.pages_contributed * 20);
  EXPECT_EQ(acks.messages, all.notes);
  EXPECT_EQ(acks.bytes, all.notes * 24);
  EXPECT_EQ(got.messages, all.pages_read + all.pages_contributed);
  EXPECT_EQ(got.bytes, got.messages * options.page_values * 8);
}

void run_schedule(int workers, std::uint64_t seed) {
  SCOPED_TRACE("W=" + std::to_string(workers) + ", seed " + std::to_string(seed));
  ToyOptions options;
  options.seed = seed;
  options.num_layers = 1 + static_cast<std::int64_t>(seed % 3);
  options.num_pages = 1 + static_cast<std::int64_t>(seed * 7 % 37) + (seed % 5 == 0 ? 0 : 2);
  options.pages_per_chunk = 1 + static_cast<std::int64_t>(seed % 4);
  options.num_steps = 1 + static_cast<int>(seed % 2);
  options.select_per_cent = static_cast<int>(seed * 13 % 101);
  options.any_order = seed % 4 == 3;
  if (options.num_pages < 2) options.sequences_per_step = 1;
  TwinOptions twin;
  twin.num_workers = workers;
  twin.seed = seed;
  twin.max_delay_us = seed % 6 == 0 ? 0 : 150;
  twin.slow_rank = seed % 7 == 0 ? static_cast<int>(seed) % workers : -1;
  twin.duplicate_per_mille = seed % 3 == 0 ? 100 : 0;
  std::vector<ToyMemory> memory(static_cast<std::size_t>(workers));
  TwinNetwork network(twin);
  const auto outcomes = run_workers(network, workers, options, &memory);
  for (const Outcome& outcome : outcomes) ASSERT_EQ(text_of(outcome.error), "");
  EXPECT_EQ(network.violations(), std::vector<std::string>{});
  expect_traffic(network, workers, options, outcomes);
}

TEST(Twin, ManySchedulesGiveTheSameSums) {
  for (const int workers : {1, 2, 3, 4, 5, 7}) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) run_schedule(workers, seed);
  }
}

TEST(Twin, SixteenWorkers) {
  for (std::uint64_t seed = 100; seed < 112; ++seed) run_schedule(16, seed);
}

TEST(Twin, DuplicatesAreDropped) {
  ToyOptions options;
  TwinOptions twin;
  twin.num_workers = 3;
  twin.duplicate_per_mille = 1000;
  std::vector<ToyMemory> memory(3);
  TwinNetwork network(twin);
  std::int64_t dropped = 0;
  for (const Outcome& outcome : run_workers(network, 3, options, &memory)) {
    ASSERT_EQ(text_of(outcome.error), "");
    dropped += outcome.result.duplicates + outcome.result.stale;
  }
  EXPECT_GT(dropped, 100);
}

// A worker is lost after some number of deliveries, anywhere in the step: everyone ends, and names it.
TEST(Twin, ALostWorkerIsNamedByAll) {
  int cut_short = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int workers = 2 + static_cast<int>(seed % 4);
    const int victim = static_cast<int>(seed) % workers;
    ToyOptions options;
    options.seed = seed;
    options.deadline_seconds = 30;
    options.any_order = seed % 2 == 1;
    TwinOptions twin;
    twin.num_workers = workers;
    twin.seed = seed;
    twin.max_delay_us = 60;
    twin.lost_seconds = 0.02;
    std::vector<ToyMemory> memory(static_cast<std::size_t>(workers));
    TwinNetwork network(twin);
    network.lose_after(victim, static_cast<std::int64_t>(seed * 37 % 400));
    const auto outcomes = run_workers(network, workers, options, &memory);
    EXPECT_EQ(network.violations(), std::vector<std::string>{});
    const bool lost = network.transport(victim).failure() != nullptr;
    cut_short += lost;
    for (int rank = 0; rank < workers; ++rank) {
      const std::exception_ptr error = outcomes[static_cast<std::size_t>(rank)].error;
      if (!error) continue;  // it had finished before
      ASSERT_TRUE(lost) << text_of(error);
      try {
        std::rethrow_exception(error);
      } catch (const PeerLost& gone) {
        EXPECT_EQ(gone.rank(), victim);
        EXPECT_NE(rank, victim);
      } catch (const Aborted& aborted) {
        EXPECT_EQ(rank, victim) << aborted.what();
      } catch (const std::exception& other) {
        ADD_FAILURE() << other.what();
      }
    }
  }
  EXPECT_GT(cut_short, 40) << "most schedules should lose the worker before the end";
}

// --- single faults --------------------------------------------------------------------------------------------------

class TwinPair : public ::testing::Test {
 protected:
  static TwinOptions options() {
    TwinOptions twin;
    twin.num_workers = 2;
    twin.lost_seconds = 0.01;
    return twin;
  }
  static SequenceShape shape() {
    SequenceShape shape;
    shape.id = {3, 0};
    shape.num_layers = 1;
    shape.num_pages = 4;
    shape.pages_per_chunk = 1;
    shape.num_workers = 2;
    return shape;
  }
  GetRequest request(SegmentId segment, std::int64_t offset, std::int64_t bytes) {
    return {1, {segment, offset}, target_.data(), bytes, MemoryKind::kHost};
  }
  void read(SegmentId segment, std::int64_t offset, std::int64_t bytes) {
    const std::array<GetRequest, 1> gets = {request(segment, offset, bytes)};
    reader_.wait(reader_.get(gets), in_seconds(10), "a test");
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(64, std::byte{7});
  std::vector<std::byte> target_ = std::vector<std::byte>(64);
  TwinNetwork network_{options()};
  Transport& reader_ = network_.transport(0);
  Transport& owner_ = network_.transport(1);
};

TEST_F(TwinPair, ReadingFreedBytesIsAViolation) {
  const SegmentId segment = owner_.register_segment(memory_.data(), 64, MemoryKind::kHost, in_seconds(1));
  owner_.mark_readable(memory_.data() + 8, 40);
  read(segment, 8, 40);
  read(segment, 20, 1);
  read(segment, 64, 0);
  EXPECT_TRUE(network_.violations().empty());
  EXPECT_EQ(target_[0], std::byte{7});

  owner_.mark_freed(memory_.data() + 16, 8);
  read(segment, 8, 8);
  read(segment, 24, 24);
  EXPECT_TRUE(network_.violations().empty()) << "both sides of the hole are still readable";
  read(segment, 15, 2);
  EXPECT_EQ(network_.violations().size(), 1u);
  EXPECT_EQ(target_[1], std::byte{0xFB}) << "freed bytes are poisoned";
  read(segment, 0, 8);
  EXPECT_EQ(network_.violations().size(), 2u) << "never readable";
}

TEST_F(TwinPair, AGetThatTheFreeOvertakesIsAViolation) {
  TwinOptions slow = options();
  slow.max_delay_us = 200000;
  slow.seed = 3;  // its first delay is about 0.1 s
  TwinNetwork network(slow);
  Transport& owner = network.transport(1);
  const SegmentId segment = owner.register_segment(memory_.data(), 64, MemoryKind::kHost, in_seconds(1));
  owner.mark_readable(memory_.data(), 64);
  const std::array<GetRequest, 1> gets = {request(segment, 0, 8)};
  const Ticket ticket = network.transport(0).get(gets);
  owner.mark_freed(memory_.data(), 8);
  owner.mark_readable(memory_.data(), 64);  // in use again: only the generation tells
  network.transport(0).wait(ticket, in_seconds(10), "a test");
  ASSERT_EQ(network.violations().size(), 1u);
  EXPECT_NE(network.violations()[0].find("was under way"), std::string::npos) << network.violations()[0];
}

TEST_F(TwinPair, NothingOutsideOfSegmentsIsRead) {
  const SegmentId segment = owner_.register_segment(memory_.data(), 64, MemoryKind::kHost, in_seconds(1));
  owner_.mark_readable(memory_.data(), 64);
  owner_.unregister_segment(segment, in_seconds(1));
  EXPECT_THROW(read(segment, 0, 8), std::logic_error);
  EXPECT_THROW(read(kProbeSegment, kProbeBytes - 7, 8), std::logic_error) << "over the end";
  EXPECT_NO_THROW(read(kProbeSegment, kProbeBytes - 8, 8));
}

TEST_F(TwinPair, DeadlinesNameWhatIsMissingAndLeaveTheExchangeUsable) {
  PageExchange exchange(&reader_, {}), other(&owner_, {});
  exchange.begin_sequence(shape());
  other.begin_sequence(shape());
  try {
    exchange.take_means(0, 1, in_seconds(0.01));
    ADD_FAILURE() << "there are no means";
  } catch (const DeadlinePassed& error) {
    EXPECT_STREQ(
        error.what(),
        "the deadline passed while waiting for the means of layer 0, chunk 1 of sequence 0, step 3 from worker 1");
  }
  EXPECT_THROW(exchange.take_contributions(0, 3, in_seconds(0.01)), DeadlinePassed);
  EXPECT_THROW(exchange.wait_complete(0, 0, in_seconds(0.01)), DeadlinePassed);
  EXPECT_THROW(exchange.next_contribution(0, 0, in_seconds(0.01)), DeadlinePassed);
  const std::vector<RemoteAddress> pages = {{kProbeSegment, 0}};
  other.publish(0, 1, pages, std::as_bytes(std::span("x", 1)));
  EXPECT_EQ(exchange.take_means(0, 1, in_seconds(10)).size(), 1u);
  EXPECT_EQ(exchange.address_of(0, 1), (RemoteAddress{kProbeSegment, 0}));
}

TEST_F(TwinPair, AbortWakesEveryWait) {
  PageExchange exchange(&reader_, {});
  exchange.begin_sequence(shape());
  std::atomic<int> woken{0};
  std::vector<std::thread> waiting;
  for (int which = 0; which < 3; ++which) {
    waiting.emplace_back([&, which] {
      try {
        if (which == 0) exchange.take_means(0, 1, in_seconds(60));
        if (which == 1) exchange.wait_complete(0, 0, in_seconds(60));
        if (which == 2) exchange.take_contributions(0, 1, in_seconds(60));
      } catch (const Aborted& error) {
        woken += std::string(error.what()).find("a better idea") != std::string::npos;
      }
    });
  }
  reader_.abort("a better idea");
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(woken, 3);
  EXPECT_THROW(exchange.next_contribution(), Aborted) << "later calls too";
  EXPECT_THROW(reader_.send(1, MessageKind::kUser, {}), Aborted);
  EXPECT_THROW(reader_.get({}), Aborted);
  EXPECT_EQ(owner_.failure(), nullptr);
}

TEST_F(TwinPair, ALossIsRaisedWithWhatWasWaitedFor) {
  PageExchange exchange(&reader_, {});
  exchange.begin_sequence(shape());
  network_.lose(1);
  try {
    exchange.take_means(0, 3, in_seconds(60));
    ADD_FAILURE() << "worker 1 is lost";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("the means of layer 0, chunk 3"), std::string::npos) << error.what();
  }
  ASSERT_NE(reader_.failure(), nullptr);
  EXPECT_EQ(reader_.failure()->rank, 1);
}

TEST_F(TwinPair, OldSequencesAreDroppedAndNewOnesKept) {
  PageExchange exchange(&reader_, {}), other(&owner_, {});
  SequenceShape first = shape(), second = shape();
  second.id = {4, 0};
  const std::vector<RemoteAddress> pages = {{kProbeSegment, 0}};
  other.begin_sequence(first);
  other.end_sequence(in_seconds(1));
  other.begin_sequence(second);
  other.publish(0, 1, pages, std::as_bytes(std::span("new", 3)));  // long before worker 0 begins it
  exchange.begin_sequence(first);
  exchange.end_sequence(in_seconds(1));
  exchange.begin_sequence(second);
  EXPECT_EQ(exchange.take_means(0, 1, in_seconds(10)).size(), 3u);
  exchange.end_sequence(in_seconds(1));
  EXPECT_THROW(exchange.begin_sequence(first), std::logic_error);
  other.publish(0, 3, pages, {});
  WireWriter user(0);
  while (exchange.counters().stale == 0) std::this_thread::yield();
  EXPECT_EQ(exchange.counters().held_bytes, 0);
}

TEST_F(TwinPair, AMalformedMessageAbortsWithItsReason) {
  PageExchange exchange(&reader_, {});
  exchange.begin_sequence(shape());
  WireWriter body(0);
  body.put(std::int64_t{3});
  body.put(std::int64_t{0});
  body.put(std::int32_t{0});
  body.put(std::int32_t{1});
  body.put(std::uint32_t{1000000});
  owner_.send(0, MessageKind::kMeans, body.bytes());
  try {
    exchange.take_means(0, 1, in_seconds(10));
    ADD_FAILURE() << "the message is too short";
  } catch (const Aborted& error) {
    EXPECT_NE(std::string(error.what()).find("a message ends after"), std::string::npos) << error.what();
  }
}

TEST_F(TwinPair, MessagesForLaterSequencesAreBounded) {
  PageExchange::Options small;
  small.max_early_bytes = 100;
  PageExchange exchange(&reader_, small), other(&owner_, {});
  other.begin_sequence(shape());
  const std::vector<RemoteAddress> pages = {{kProbeSegment, 0}};
  const std::vector<std::byte> means(80);
  other.publish(0, 1, pages, means);
  while (reader_.failure() == nullptr) std::this_thread::yield();
  EXPECT_NE(reader_.failure()->reason.find("is ahead at sequence 0, step 3"), std::string::npos)
      << reader_.failure()->reason;
}

TEST_F(TwinPair, StagingWaitsForAcknowledgements) {
  const SegmentId staging = owner_.register_segment(memory_.data(), 64, MemoryKind::kHost, in_seconds(1));
  owner_.mark_readable(memory_.data(), 64);
  PageExchange::Options two_slots;
  two_slots.staging = {{staging, 0}, 8, 2};
  PageExchange contributor(&owner_, two_slots), owner(&reader_, two_slots);
  contributor.begin_sequence(shape());
  owner.begin_sequence(shape());
  EXPECT_THROW(contributor.acquire_staging(3, in_seconds(1)), std::logic_error);
  const auto slots = contributor.acquire_staging(2, in_seconds(1));
  const std::vector<PageExchange::Staged> page0 = {{0, slots[1]}};
  contributor.announce(0, 0, 1, page0);
  contributor.finish(0, 1);
  EXPECT_THROW(contributor.acquire_staging(1, in_seconds(0.01)), DeadlinePassed);
  EXPECT_THROW(contributor.end_sequence(in_seconds(0.01)), DeadlinePassed);
  const auto notes = owner.take_contributions(0, 1, in_seconds(10));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].pages[0].address, (RemoteAddress{staging, slots[1] * 8}));
  void* const to[] = {target_.data()};
  owner.wait(owner.get_staged(notes[0], to, MemoryKind::kHost), in_seconds(10));
  owner.acknowledge(notes[0]);
  EXPECT_EQ(contributor.acquire_staging(1, in_seconds(10))[0], slots[1]);
  EXPECT_NO_THROW(contributor.end_sequence(in_seconds(10)));
  EXPECT_TRUE(network_.violations().empty());
}

TEST_F(TwinPair, LinksAreMeasured) {
  const LinkMeasurement measured = measure_link(reader_, 0.01, in_seconds(30));
  EXPECT_EQ(measured.peer, 1);
  EXPECT_GT(measured.get_gbps, 0);
  EXPECT_GT(measured.get_seconds, 0);
  EXPECT_NE(describe(measured, reader_).find("GB/s"), std::string::npos);
  EXPECT_TRUE(network_.violations().empty());
}

}  // namespace
}  // namespace oomb::comm
