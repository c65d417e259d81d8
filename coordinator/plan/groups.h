// Division of a batch of documents of many lengths over workers: data-parallel groups, and in each the sequences that
// its workers go through together.
//
// Pure: nothing but the lengths, the number of workers and the cost of a chunk decides.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace oomb::plan {

struct GroupRules {
  std::int64_t workers = 1;
  std::int64_t chunk_tokens = 4096;
  std::int64_t page_tokens = 128;
  std::int64_t max_sequence = 0;  // most tokens of a packed sequence; 0: no limit
  std::int64_t max_group_workers = 64;
  double balanced = 1.1;  // a division whose max/mean is at most this is good enough
};

/// Cost of one chunk in any unit: `tokens` of it that are documents', `past` tokens before it of the document that
/// crosses its left border (0: none does). Not negative; more tokens cost more.
using ChunkCost = std::function<double(std::int64_t tokens, std::int64_t past)>;

struct PackedDocument {
  std::int64_t document = 0;  // index into the lengths
  std::int64_t begin = 0;     // its first token's place in the sequence
};

/// Documents one after another. A document that crosses a chunk border begins on a page border, so no page that is ever
/// read mixes two; padding before it counts as tokens of the sequence only.
struct PackedSequence {
  std::vector<PackedDocument> documents;
  std::int64_t tokens = 0;
  std::int64_t offset = 0;  // chunk s is the work of worker (s + offset) mod W of the group
};

struct Group {
  std::int64_t first_worker = 0, workers = 1;
  std::vector<PackedSequence> sequences;  // worked on in this order
};

struct GroupPlan {
  std::vector<Group> groups;  // of equal size; every worker belongs to one
  std::vector<double> work;   // of each worker
  double max_over_mean() const;
};

/// Every document is in exactly one sequence. Of all divisions into equal groups of at most max_group_workers, the one
/// with most groups that is balanced, since smaller groups exchange less; if none is, the best balanced one. Documents
/// go to groups longest first, each to the group with least work; in a group all are packed together, longest first,
/// or, where that is not balanced, those longer than a chunk are sequences of their own; and each sequence gets the
/// offset that leaves the busiest worker least. Balance ends at the size of a chunk: a batch of fewer than about ten
/// chunks for each worker may have no balanced division. InputError for no documents, a length below 1 or above
/// max_sequence (naming the document), and workers that cannot be divided into such groups.
GroupPlan plan_groups(std::span<const std::int64_t> lengths, const GroupRules& rules, const ChunkCost& cost);

}  // namespace oomb::plan
