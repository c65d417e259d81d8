// The ledgers of the page exchange without any network.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "comm/exchange/contribution_inbox.h"
#include "comm/exchange/contribution_outbox.h"
#include "comm/exchange/means_board.h"
#include "comm/exchange/wire.h"

namespace oomb::comm {
namespace {

// 3 workers, chunks of 2 pages, the last one of 1: chunk s belongs to worker (s + 1) mod 3.
SequenceShape shape_of(std::int64_t pages, int workers = 3) {
  SequenceShape shape;
  shape.id = {7, 2};
  shape.num_layers = 2;
  shape.num_pages = pages;
  shape.pages_per_chunk = 2;
  shape.num_workers = workers;
  shape.first_owner = workers > 1 ? 1 : 0;
  return shape;
}

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> result;
  for (int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(SequenceShape, CutsAndOwners) {
  const SequenceShape shape = shape_of(7);
  EXPECT_EQ(shape.num_chunks(), 4);
  EXPECT_EQ(shape.pages_of(0), 2);
  EXPECT_EQ(shape.pages_of(3), 1);
  EXPECT_EQ(shape.chunk_of(6), 3);
  EXPECT_EQ(shape.owner_of(0), 1);
  EXPECT_EQ(shape.owner_of(2), 0);
}

TEST(Wire, ShortAndLongBodiesAreErrors) {
  WireWriter writer(12);
  writer.put(std::int64_t{-5});
  writer.put(std::uint32_t{9});
  WireReader reader(writer.bytes());
  EXPECT_EQ(reader.get<std::int64_t>(), -5);
  EXPECT_THROW(reader.expect_end(), ProtocolError);
  EXPECT_THROW(reader.get<std::int64_t>(), ProtocolError);
  EXPECT_EQ(reader.get<std::uint32_t>(), 9u);
  EXPECT_NO_THROW(reader.expect_end());
}

TEST(MeansBoard, KeepsUntilTakenAndAddressesUntilTheEnd) {
  MeansBoard board(shape_of(7));
  const std::vector<RemoteAddress> pages = {{4, 100}, {5, 200}};
  EXPECT_FALSE(board.published(1, 2));
  EXPECT_THROW(board.address_of(1, 4), std::logic_error);
  EXPECT_TRUE(board.put(1, 2, pages, bytes({1, 2, 3})));
  EXPECT_EQ(board.held_bytes(), 3);
  EXPECT_FALSE(board.put(1, 2, pages, bytes({9, 9, 9}))) << "a duplicate changes nothing";
  EXPECT_TRUE(board.has_means(1, 2));
  EXPECT_FALSE(board.has_means(0, 2));
  EXPECT_EQ(board.take(1, 2), bytes({1, 2, 3}));
  EXPECT_EQ(board.held_bytes(), 0);
  EXPECT_FALSE(board.has_means(1, 2));
  EXPECT_THROW(board.take(1, 2), std::logic_error);
  EXPECT_FALSE(board.put(1, 2, pages, bytes({9}))) << "a duplicate of what was taken";
  EXPECT_EQ(board.address_of(1, 5), (RemoteAddress{5, 200}));
}

TEST(MeansBoard, RefusesWhatCannotBe) {
  MeansBoard board(shape_of(7));
  const std::vector<RemoteAddress> pages = {{1, 0}, {1, 1}};
  EXPECT_THROW(board.put(2, 0, pages, {}), ProtocolError);
  EXPECT_THROW(board.put(0, 4, pages, {}), ProtocolError);
  EXPECT_THROW(board.put(0, -1, pages, {}), ProtocolError);
  EXPECT_THROW(board.put(0, 3, pages, {}), ProtocolError) << "the last chunk has one page";
  EXPECT_THROW(board.take(0, 9), std::logic_error);
  EXPECT_THROW(board.address_of(0, 7), std::logic_error);
}

TEST(StagingSlots, EachSlotOnce) {
  StagingSlots slots(5);
  const auto three = slots.take(3);
  const auto two = slots.take(2);
  std::set<std::int64_t> all(three.begin(), three.end());
  all.insert(two.begin(), two.end());
  EXPECT_EQ(all, (std::set<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_THROW(slots.take(1), std::logic_error);
  EXPECT_NO_THROW(slots.take(0));
  slots.give_back(two);
  EXPECT_EQ(slots.num_free(), 2);
  EXPECT_THROW(slots.give_back(two), std::logic_error);
}

TEST(ContributionOutbox, CountsWhatWasAnnouncedZeroToo) {
  StagingSlots slots(10);
  ContributionOutbox outbox(shape_of(10), 2, &slots);  // own chunks: 1 and 4; worker 0 has 2, worker 1 has 0 and 3
  const std::vector<std::int64_t> two = {0, 1}, one = {1}, last = {7};
  EXPECT_EQ(outbox.announce(0, 0, 4, two, slots.take(2)), 1u);
  EXPECT_EQ(outbox.announce(0, 3, 4, last, slots.take(1)), 2u);
  EXPECT_EQ(outbox.announce(1, 0, 4, one, slots.take(1)), 3u);
  const auto markers = outbox.finish(0, 4);
  ASSERT_EQ(markers[1].size(), 2u);
  EXPECT_EQ(markers[1][0].target_chunk, 0);
  EXPECT_EQ(markers[1][0].pages, 2);
  EXPECT_EQ(markers[1][1].target_chunk, 3);
  EXPECT_EQ(markers[1][1].pages, 1);
  ASSERT_EQ(markers[0].size(), 1u);
  EXPECT_EQ(markers[0][0].pages, 0) << "nothing was announced for chunk 2";
  EXPECT_TRUE(markers[2].empty());

  EXPECT_THROW(outbox.finish(0, 4), std::logic_error);
  EXPECT_THROW(outbox.announce(0, 0, 4, one, {}), std::logic_error) << "after finish";
  EXPECT_THROW(outbox.announce(0, 1, 4, one, {}), std::logic_error) << "an own chunk";
  EXPECT_THROW(outbox.announce(1, 3, 1, last, {}), std::logic_error) << "a later chunk";
  EXPECT_THROW(outbox.announce(1, 3, 4, one, {}), std::logic_error) << "a page of another chunk";
  EXPECT_THROW(outbox.finish(0, 3), std::logic_error) << "another worker's chunk";

  EXPECT_EQ(slots.num_free(), 6);
  EXPECT_TRUE(outbox.acknowledged(1, 1));
  EXPECT_EQ(slots.num_free(), 8);
  EXPECT_FALSE(outbox.acknowledged(1, 1)) << "a duplicate";
  EXPECT_EQ(slots.num_free(), 8);
  EXPECT_THROW(outbox.acknowledged(1, 4), ProtocolError);
  EXPECT_THROW(outbox.acknowledged(0, 1), ProtocolError);
  EXPECT_THROW(outbox.acknowledged(1, 0), ProtocolError);
  EXPECT_EQ(outbox.outstanding(), 2);
  EXPECT_EQ(outbox.slowest_owner(), 1);
}

Contribution note_of(std::int64_t target, std::int64_t from, int peer, std::uint64_t number,
                     std::vector<std::int64_t> pages, std::int64_t layer = 0) {
  Contribution note;
  note.layer = layer;
  note.target_chunk = target;
  note.from_chunk = from;
  note.peer = peer;
  note.note = number;
  for (std::int64_t page : pages) note.pages.push_back({page, {1, page * 8}});
  return note;
}

TEST(ContributionInbox, CompleteOnlyWhenCountsAreMetAndAcknowledged) {
  ContributionInbox inbox(shape_of(6), 1);  // own chunk 0; worker 2 has chunk 1, worker 0 chunk 2
  EXPECT_FALSE(inbox.complete(0, 0));
  EXPECT_EQ(inbox.first_missing(0, 0), 2);
  const std::vector<MarkerCount> two = {{0, 2}}, none = {{0, 0}};
  EXPECT_TRUE(inbox.add_marker(0, 0, 2, two));
  EXPECT_FALSE(inbox.add_marker(0, 0, 2, two)) << "a duplicate";
  EXPECT_FALSE(inbox.all_in(0, 2));
  const Contribution second = note_of(0, 2, 0, 2, {1}), first = note_of(0, 2, 0, 1, {0});
  EXPECT_TRUE(inbox.add_note(second));
  EXPECT_FALSE(inbox.add_note(second)) << "a duplicate";
  EXPECT_FALSE(inbox.all_in(0, 2));
  EXPECT_TRUE(inbox.add_note(first));
  EXPECT_TRUE(inbox.all_in(0, 2));
  EXPECT_TRUE(inbox.add_marker(2, 0, 1, none));
  EXPECT_TRUE(inbox.all_in(0, 1));
  EXPECT_TRUE(inbox.only_acknowledgements_missing(0, 0));

  const auto taken = inbox.take(0, 2);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].note, 1u) << "in the order of pages, not of arrival";
  EXPECT_TRUE(inbox.take(0, 2).empty());
  EXPECT_FALSE(inbox.complete(0, 0));
  inbox.acknowledge(taken[1]);
  EXPECT_FALSE(inbox.complete(0, 0));
  inbox.acknowledge(taken[0]);
  EXPECT_TRUE(inbox.complete(0, 0));
  EXPECT_FALSE(inbox.only_acknowledgements_missing(0, 0));
  EXPECT_EQ(inbox.first_missing(0, 0), -1);
  EXPECT_THROW(inbox.acknowledge(taken[0]), std::logic_error);
  EXPECT_FALSE(inbox.complete(1, 0)) << "layers are apart";
  EXPECT_THROW((void)inbox.complete(0, 1), std::logic_error) << "another worker's chunk";
}

TEST(ContributionInbox, RefusesWhatCannotBe) {
  ContributionInbox inbox(shape_of(12), 1);  // own chunks 0 and 3; worker 2 has 1 and 4, worker 0 has 2 and 5
  EXPECT_THROW(inbox.add_note(note_of(0, 2, 2, 1, {0})), ProtocolError) << "chunk 2 is worker 0's";
  EXPECT_THROW(inbox.add_note(note_of(3, 2, 0, 1, {6})), ProtocolError) << "not earlier";
  EXPECT_THROW(inbox.add_note(note_of(2, 4, 2, 1, {4})), ProtocolError) << "not ours";
  EXPECT_THROW(inbox.add_note(note_of(0, 2, 0, 1, {2})), ProtocolError) << "a page of chunk 1";
  EXPECT_THROW(inbox.add_note(note_of(0, 2, 0, 1, {-1})), ProtocolError);
  EXPECT_THROW(inbox.add_note(note_of(0, 2, 0, 1, {0}, 2)), ProtocolError) << "no such layer";
  const std::vector<MarkerCount> short_of_one = {{0, 1}}, wrong = {{0, 1}, {2, 1}}, negative = {{0, -1}, {3, 0}};
  EXPECT_THROW(inbox.add_marker(0, 0, 5, short_of_one), ProtocolError);
  EXPECT_THROW(inbox.add_marker(0, 0, 5, wrong), ProtocolError);
  EXPECT_THROW(inbox.add_marker(0, 0, 5, negative), ProtocolError);
  EXPECT_THROW(inbox.add_marker(0, 0, 6, short_of_one), ProtocolError) << "no such chunk";
  EXPECT_TRUE(inbox.add_marker(0, 0, 2, short_of_one));
  EXPECT_THROW(inbox.add_note(note_of(0, 2, 0, 1, {0, 1})), ProtocolError) << "more pages than counted";
  EXPECT_TRUE(inbox.add_note(note_of(0, 5, 0, 2, {0, 1})));
  const std::vector<MarkerCount> too_few = {{0, 1}, {3, 0}};
  EXPECT_THROW(inbox.add_marker(0, 0, 5, too_few), ProtocolError) << "more announced than counted";
}

// All that one owner is ever told about a sequence, in random orders and some of it twice: a chunk is complete exactly
// when the last of what concerns it has come.
TEST(ContributionInbox, NeverCompleteTooEarlyInAnyOrder) {
  for (const int workers : {2, 3, 5, 7}) {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
      std::mt19937_64 random(seed * 1000 + static_cast<std::uint64_t>(workers));
      const SequenceShape shape = shape_of(23, workers);
      const int rank = static_cast<int>(seed) % workers;
      ContributionInbox inbox(shape, rank);
      struct Message {
        std::int64_t layer, from;
        std::vector<MarkerCount> counts;
        Contribution note;
      };
      std::vector<Message> messages;
      std::vector<std::uint64_t> numbers(static_cast<std::size_t>(workers));
      std::map<std::pair<std::int64_t, std::int64_t>, int> left;  // messages that concern an own (layer, chunk)
      for (std::int64_t layer = 0; layer < shape.num_layers; ++layer) {
        for (std::int64_t from = 0; from < shape.num_chunks(); ++from) {
          const int peer = shape.owner_of(from);
          if (peer == rank) continue;
          Message marker{layer, from, {}, {}};
          for (std::int64_t target = 0; target < from; ++target) {
            if (shape.owner_of(target) != rank) continue;
            const auto pages = static_cast<std::int64_t>(random() % 3);
            marker.counts.push_back({target, pages});
            ++left[{layer, target}];
            for (std::int64_t page = 0; page < pages; ++page) {
              messages.push_back(
                  {layer,
                   from,
                   {},
                   note_of(target, from, peer, ++numbers[static_cast<std::size_t>(peer)], {target * 2 + page}, layer)});
              ++left[{layer, target}];
            }
          }
          messages.push_back(marker);
        }
      }
      const std::size_t distinct = messages.size();
      for (std::size_t i = 0; i < distinct; i += 5) messages.push_back(messages[i]);
      std::shuffle(messages.begin(), messages.end(), random);
      std::int64_t accepted = 0;
      for (const Message& message : messages) {
        if (message.note.note == 0) {
          if (!inbox.add_marker(shape.owner_of(message.from), message.layer, message.from, message.counts)) continue;
          for (const MarkerCount& count : message.counts) --left[{message.layer, count.target_chunk}];
        } else {
          if (!inbox.add_note(message.note)) continue;
          inbox.acknowledge(*inbox.take_oldest());
          --left[{message.layer, message.note.target_chunk}];
        }
        ++accepted;
        for (const auto& [where, count] : left) ASSERT_EQ(inbox.complete(where.first, where.second), count == 0);
      }
      ASSERT_EQ(accepted, static_cast<std::int64_t>(distinct));
      for (const auto& [where, count] : left) ASSERT_EQ(count, 0);
      EXPECT_EQ(inbox.held_bytes(), 0);
    }
  }
}

}  // namespace
}  // namespace oomb::comm
