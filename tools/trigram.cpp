// The loss that a trigram model reaches on a run's held-out sequences: what a trained model has to beat.
//
//   oomb-trigram RUN.yaml [--set section.field=value ...]      prints {"loss": ..., "tokens": ...}, nats per token
//
// Counts come from the run's training tokens. Interpolated absolute discounting, at each order n with context h:
//   p_n(c|h) = max(count(hc) − D, 0)/count(h) + D·types(h)/count(h) · p_{n−1}(c),   p_1(c) = (count(c) + 1)/(N + V)
// where count(h) and types(h) are sums over c, and an unseen context takes the next lower order. Inside a sequence only
// its own tokens are context, as for the model. Byte-level text: V³ counters of 4 bytes, 68 MB.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "configs/error.h"
#include "configs/run_config.h"
#include "worker/data/sequences.h"
#include "worker/data/token_stream.h"

namespace oomb {
namespace {

constexpr double kDiscount = 0.75;
constexpr int64_t kBlock = int64_t{1} << 20;
constexpr int64_t kLargestVocab = 1024;  // V³ counters

/// Counts of all continuations of one context length: count(h, c) at h·V + c.
class Order {
 public:
  Order(int64_t contexts, int64_t vocab)
      : vocab_(vocab),
        count_(static_cast<size_t>(contexts * vocab)),
        total_(static_cast<size_t>(contexts)),
        types_(static_cast<size_t>(contexts)) {}

  void add(int64_t context, int64_t token) {
    uint32_t& count = count_[static_cast<size_t>(context * vocab_ + token)];
    if (count == 0) ++types_[static_cast<size_t>(context)];
    ++count;
    ++total_[static_cast<size_t>(context)];
  }

  double probability(int64_t context, int64_t token, double lower) const {
    const double total = static_cast<double>(total_[static_cast<size_t>(context)]);
    if (total == 0) return lower;
    const double count = count_[static_cast<size_t>(context * vocab_ + token)];
    const double types = static_cast<double>(types_[static_cast<size_t>(context)]);
    return std::max(count - kDiscount, 0.0) / total + kDiscount * types / total * lower;
  }

 private:
  int64_t vocab_;
  std::vector<uint32_t> count_;
  std::vector<int64_t> total_, types_;
};

class Trigram {
 public:
  explicit Trigram(int64_t vocab)
      : vocab_(vocab), ones_(static_cast<size_t>(vocab)), twos_(vocab, vocab), threes_(vocab * vocab, vocab) {}

  void count(const data::TokenStream& stream, int64_t end) {
    std::vector<int64_t> block;
    int64_t a = -1, b = -1;
    for (int64_t begin = 0; begin < end; begin += kBlock) {
      block.resize(static_cast<size_t>(std::min(kBlock, end - begin)));
      stream.read(begin, block);
      for (const int64_t c : block) {
        ++ones_[static_cast<size_t>(c)];
        if (b >= 0) twos_.add(b, c);
        if (a >= 0) threes_.add(a * vocab_ + b, c);
        a = b;
        b = c;
      }
    }
    total_ = end;
  }

  /// Sum over ids[1..] of −log p.
  double loss(const std::vector<int64_t>& ids) const {
    double sum = 0;
    for (size_t i = 1; i < ids.size(); ++i) {
      double p = static_cast<double>(ones_[static_cast<size_t>(ids[i])] + 1) / static_cast<double>(total_ + vocab_);
      p = twos_.probability(ids[i - 1], ids[i], p);
      if (i >= 2) p = threes_.probability(ids[i - 2] * vocab_ + ids[i - 1], ids[i], p);
      sum -= std::log(p);
    }
    return sum;
  }

 private:
  int64_t vocab_;
  int64_t total_ = 0;
  std::vector<int64_t> ones_;
  Order twos_, threes_;
};

void run(const std::string& file, const std::vector<std::string>& overrides) {
  const RunConfig config = load_run_config(file, overrides);
  if (config.data.kind != DataKind::kText) throw InputError(file + ": data.kind: the trigram baseline is for text");
  data::CorpusOptions corpus;
  for (const auto& path : config.data.paths) corpus.paths.push_back(path.string());
  corpus.extensions = config.data.extensions;
  corpus.max_bytes = config.data.max_bytes;
  const std::shared_ptr<const data::TokenStream> stream = data::open_corpus(corpus);
  const int64_t vocab = stream->vocab_size_needed();
  if (vocab > kLargestVocab)
    throw InputError(file + ": a trigram table of " + std::to_string(vocab) + "³ is too large");

  data::WindowOptions windows;
  windows.sequence_length = config.sequence.length;
  windows.split = data::Split::kHeldOut;
  windows.held_out_fraction = config.data.holdout_fraction;
  const auto held_out = data::make_windows(stream, windows);
  const int64_t size = stream->size();
  Trigram model(vocab);
  model.count(*stream, size - std::llround(config.data.holdout_fraction * static_cast<double>(size)));

  double sum = 0;
  int64_t tokens = 0;
  std::vector<int64_t> ids(static_cast<size_t>(config.sequence.length));
  for (int64_t i = 0; i < std::min(config.eval.sequences, held_out->num_sequences()); ++i) {
    held_out->get(i, ids);
    sum += model.loss(ids);
    tokens += config.sequence.length - 1;
  }
  if (tokens == 0) throw InputError(file + ": sequence.length: a sequence of one token has nothing to predict");
  std::printf("{\"loss\": %.6f, \"tokens\": %lld}\n", sum / static_cast<double>(tokens),
              static_cast<long long>(tokens));
}

}  // namespace
}  // namespace oomb

int main(int argc, char** argv) {
  std::string file;
  std::vector<std::string> overrides;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--set" && i + 1 < argc) {
      overrides.emplace_back(argv[++i]);
    } else if (file.empty() && argv[i][0] != '-') {
      file = argv[i];
    } else {
      file.clear();
      break;
    }
  }
  if (file.empty()) {
    std::fprintf(stderr, "usage: oomb-trigram RUN.yaml [--set section.field=value ...]\n");
    return 2;
  }
  try {
    oomb::run(file, overrides);
  } catch (const oomb::InputError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
