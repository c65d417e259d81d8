#include "coordinator/plan/groups.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "configs/error.h"

namespace oomb::plan {
namespace {

using Documents = std::vector<std::int64_t>;  // indices

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

class GroupPlanner {
 public:
  GroupPlanner(std::span<const std::int64_t> lengths, const GroupRules& rules, const ChunkCost& cost)
      : lengths_(lengths), rules_(rules), cost_(cost) {
    check();
    by_length_.resize(lengths.size());
    std::iota(by_length_.begin(), by_length_.end(), std::int64_t{0});
    std::stable_sort(by_length_.begin(), by_length_.end(),
                     [&](std::int64_t a, std::int64_t b) { return length(a) > length(b); });
    for (const std::int64_t d : by_length_) cost_of_document_.push_back(document_cost(length(d)));
  }

  GroupPlan plan() {
    std::optional<GroupPlan> best;
    for (std::int64_t groups = rules_.workers; groups >= 1; --groups) {
      if (rules_.workers % groups != 0 || rules_.workers / groups > rules_.max_group_workers) continue;
      // Documents in sequences of their own have offsets of their own, but each ends with a round that is not full.
      for (const bool alone : {false, true}) {
        GroupPlan candidate = divide(groups, alone);
        const double balance = candidate.max_over_mean();
        if (!best || balance < best->max_over_mean()) best = std::move(candidate);
        if (balance <= rules_.balanced) return std::move(*best);
      }
    }
    return std::move(*best);
  }

 private:
  std::int64_t length(std::int64_t document) const { return lengths_[static_cast<std::size_t>(document)]; }

  void check() const {
    if (lengths_.empty()) throw InputError("a batch without documents; allowed: at least one");
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const std::int64_t most =
          rules_.max_sequence > 0 ? rules_.max_sequence : std::numeric_limits<std::int64_t>::max() / 2;
      if (lengths_[i] >= 1 && lengths_[i] <= most) continue;
      throw InputError("document " + std::to_string(i) + " has " + std::to_string(lengths_[i]) +
                       " tokens; allowed: 1 to " + std::to_string(most));
    }
    for (std::int64_t w = std::min(rules_.workers, rules_.max_group_workers); w >= 1; --w) {
      if (rules_.workers % w == 0) return;
    }
    throw InputError(std::to_string(rules_.workers) + " workers; allowed: at least 1, in groups of at least 1");
  }

  double document_cost(std::int64_t tokens) const {
    double sum = 0;
    for (std::int64_t begin = 0; begin < tokens; begin += rules_.chunk_tokens) {
      sum += cost_(std::min(rules_.chunk_tokens, tokens - begin), begin);
    }
    return sum;
  }

  GroupPlan divide(std::int64_t groups, bool alone) const {
    std::vector<Documents> members(static_cast<std::size_t>(groups));
    std::vector<double> load(members.size());
    for (std::size_t i = 0; i < by_length_.size(); ++i) {
      const auto least = static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin());
      members[least].push_back(by_length_[i]);
      load[least] += cost_of_document_[i];
    }
    GroupPlan plan;
    const std::int64_t width = rules_.workers / groups;
    for (std::size_t g = 0; g < members.size(); ++g) {
      Group group{static_cast<std::int64_t>(g) * width, width, pack(members[g], alone)};
      std::vector<double> work(static_cast<std::size_t>(width));
      for (PackedSequence& sequence : group.sequences) place(sequence, work);
      plan.work.insert(plan.work.end(), work.begin(), work.end());
      plan.groups.push_back(std::move(group));
    }
    return plan;
  }

  // `documents` from longest to shortest, so those that have to cross chunk borders come first. With `alone`, each of
  // them is a sequence.
  std::vector<PackedSequence> pack(const Documents& documents, bool alone) const {
    std::vector<PackedSequence> sequences;
    bool closed = true;
    for (const std::int64_t d : documents) {
      const std::int64_t tokens = length(d);
      std::int64_t begin = closed ? 0 : first_place(sequences.back().tokens, tokens);
      if (closed || (rules_.max_sequence > 0 && begin + tokens > rules_.max_sequence)) {
        sequences.emplace_back();
        begin = 0;
      }
      sequences.back().documents.push_back({d, begin});
      sequences.back().tokens = begin + tokens;
      closed = alone && tokens > rules_.chunk_tokens;
    }
    return sequences;
  }

  std::int64_t first_place(std::int64_t end, std::int64_t tokens) const {
    const bool crosses = end / rules_.chunk_tokens != (end + tokens - 1) / rules_.chunk_tokens;
    return crosses ? ceil_div(end, rules_.page_tokens) * rules_.page_tokens : end;
  }

  std::vector<double> chunk_costs(const PackedSequence& sequence) const {
    const std::int64_t chunk = rules_.chunk_tokens;
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(ceil_div(sequence.tokens, chunk))), past(tokens.size());
    for (const PackedDocument& document : sequence.documents) {
      const std::int64_t end = document.begin + length(document.document);
      for (std::int64_t s = document.begin / chunk; s * chunk < end; ++s) {
        const auto i = static_cast<std::size_t>(s);
        tokens[i] += std::min(end, (s + 1) * chunk) - std::max(document.begin, s * chunk);
        past[i] += std::max<std::int64_t>(s * chunk - document.begin, 0);  // at most one document crosses the border
      }
    }
    std::vector<double> costs(tokens.size());
    for (std::size_t i = 0; i < costs.size(); ++i) costs[i] = cost_(tokens[i], past[i]);
    return costs;
  }

  // Chooses the offset; adds the sequence to its workers' work.
  void place(PackedSequence& sequence, std::vector<double>& work) const {
    const std::vector<double> costs = chunk_costs(sequence);
    const std::size_t width = work.size();
    std::vector<double> turns(width);  // of the worker that begins with chunk i
    for (std::size_t s = 0; s < costs.size(); ++s) turns[s % width] += costs[s];
    double best = std::numeric_limits<double>::infinity();
    for (std::size_t offset = 0; offset < width; ++offset) {
      double busiest = 0;
      for (std::size_t i = 0; i < width; ++i) busiest = std::max(busiest, work[(i + offset) % width] + turns[i]);
      if (busiest >= best) continue;
      best = busiest;
      sequence.offset = static_cast<std::int64_t>(offset);
    }
    for (std::size_t i = 0; i < width; ++i) work[(i + static_cast<std::size_t>(sequence.offset)) % width] += turns[i];
  }

  std::span<const std::int64_t> lengths_;
  const GroupRules& rules_;
  const ChunkCost& cost_;
  Documents by_length_;                   // longest first
  std::vector<double> cost_of_document_;  // in that order
};

}  // namespace

double GroupPlan::max_over_mean() const {
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  return *std::max_element(work.begin(), work.end()) * static_cast<double>(work.size()) / sum;
}

GroupPlan plan_groups(std::span<const std::int64_t> lengths, const GroupRules& rules, const ChunkCost& cost) {
  return GroupPlanner(lengths, rules, cost).plan();
}

}  // namespace oomb::plan
