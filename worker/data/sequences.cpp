#include "worker/data/sequences.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "configs/error.h"
#include "worker/data/counter_rng.h"

namespace oomb::data {
namespace {

// Streams of the generator; the low bits hold the epoch or the sequence.
constexpr uint64_t kOrderStream = uint64_t{1} << 62;
constexpr uint64_t kOffsetStream = uint64_t{2} << 62;
constexpr uint64_t kCopyTrainStream = uint64_t{3} << 62;
constexpr uint64_t kCopyHeldOutStream = (uint64_t{3} << 62) | (uint64_t{1} << 61);
constexpr uint64_t kRandomIdsStream = uint64_t{1} << 61;

void check_request(int64_t index, size_t got, int64_t length) {
  if (index < 0 || static_cast<int64_t>(got) != length) {
    throw std::logic_error("SequenceSource::get(" + std::to_string(index) + ") into " + std::to_string(got) +
                           " elements, sequences have " + std::to_string(length));
  }
}

class Windows final : public SequenceSource {
 public:
  Windows(std::shared_ptr<const TokenStream> stream, const WindowOptions& options)
      : stream_(std::move(stream)),
        length_(options.sequence_length),
        seed_(options.seed),
        split_(options.split),
        shuffle_(options.shuffle) {
    if (length_ < 1) throw InputError("sequence length " + std::to_string(length_) + " must be at least 1");
    if (!(options.held_out_fraction >= 0 && options.held_out_fraction < 1)) {
      throw InputError("held-out fraction must be in [0, 1)");
    }
    const int64_t size = stream_->size();
    const auto held_out = static_cast<int64_t>(std::llround(options.held_out_fraction * static_cast<double>(size)));
    begin_ = split_ == Split::kTrain ? 0 : size - held_out;
    tokens_ = split_ == Split::kTrain ? size - held_out : held_out;
    count_ = tokens_ / length_;
    if (count_ < 1) {
      throw InputError(std::string("the ") + (split_ == Split::kTrain ? "training" : "held-out") + " part has " +
                       std::to_string(tokens_) + " of the corpus's " + std::to_string(size) +
                       " tokens, a sequence needs " + std::to_string(length_));
    }
  }

  int64_t num_sequences() const override { return count_; }
  int64_t sequence_length() const override { return length_; }
  int64_t vocab_size_needed() const override { return stream_->vocab_size_needed(); }

  void get(int64_t index, std::span<int64_t> ids) const override {
    check_request(index, ids.size(), length_);
    const auto count = static_cast<uint64_t>(count_);
    const uint64_t epoch = static_cast<uint64_t>(index) / count;
    uint64_t window = static_cast<uint64_t>(index) % count;
    uint64_t offset = 0;
    if (split_ == Split::kTrain && shuffle_) {
      window = Permutation(count, seed_, kOrderStream | epoch)(window);
      const auto remainder = static_cast<uint64_t>(tokens_ - count_ * length_);
      offset = random_below(seed_, kOffsetStream | epoch, 0, remainder + 1);
    }
    stream_->read(begin_ + static_cast<int64_t>(offset) + static_cast<int64_t>(window) * length_, ids);
  }

 private:
  std::shared_ptr<const TokenStream> stream_;
  int64_t length_;
  uint64_t seed_;
  Split split_;
  bool shuffle_;
  int64_t begin_ = 0;
  int64_t tokens_ = 0;
  int64_t count_ = 0;
};

class CopyTask final : public SequenceSource {
 public:
  explicit CopyTask(const CopyTaskOptions& options) : options_(options) {
    half_ = options.sequence_length / 2 + options.sequence_length % 2;
    if (options.sequence_length < 2) throw InputError("copy task: a sequence needs at least 2 tokens");
    if (options.alphabet < 2) throw InputError("copy task: the alphabet needs at least 2 ids");
    if (options.sequences_per_epoch < 1) throw InputError("copy task: an epoch needs at least 1 sequence");
    if (options.chunk_tokens > 0 && half_ <= options.chunk_tokens) {
      throw InputError("copy task: half a sequence is " + std::to_string(half_) + " tokens and the chunk " +
                       std::to_string(options.chunk_tokens) + ": the copy must lie farther back than one chunk");
    }
  }

  int64_t num_sequences() const override { return options_.sequences_per_epoch; }
  int64_t sequence_length() const override { return options_.sequence_length; }
  int64_t vocab_size_needed() const override { return options_.alphabet; }

  void get(int64_t index, std::span<int64_t> ids) const override {
    check_request(index, ids.size(), options_.sequence_length);
    const uint64_t stream =
        (options_.split == Split::kTrain ? kCopyTrainStream : kCopyHeldOutStream) | static_cast<uint64_t>(index);
    for (int64_t i = 0; i < half_; ++i) {
      ids[static_cast<size_t>(i)] = static_cast<int64_t>(
          random_below(options_.seed, stream, static_cast<uint64_t>(i), static_cast<uint64_t>(options_.alphabet)));
    }
    for (auto i = static_cast<size_t>(half_); i < ids.size(); ++i) ids[i] = ids[i - static_cast<size_t>(half_)];
  }

 private:
  CopyTaskOptions options_;
  int64_t half_ = 0;
};

class RandomIds final : public SequenceSource {
 public:
  RandomIds(int64_t length, int64_t vocab, uint64_t seed) : length_(length), vocab_(vocab), seed_(seed) {
    if (length < 1 || vocab < 1) throw InputError("random ids: a sequence and a vocabulary have at least 1 entry");
  }

  int64_t num_sequences() const override { return 1; }
  int64_t sequence_length() const override { return length_; }
  int64_t vocab_size_needed() const override { return vocab_; }

  void get(int64_t index, std::span<int64_t> ids) const override {
    check_request(index, ids.size(), length_);
    const uint64_t stream = kRandomIdsStream | static_cast<uint64_t>(index);
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int64_t>(random_below(seed_, stream, i, static_cast<uint64_t>(vocab_)));
    }
  }

 private:
  int64_t length_, vocab_;
  uint64_t seed_;
};

}  // namespace

void make_labels(std::span<const int64_t> ids, std::span<int64_t> labels) {
  if (ids.size() != labels.size()) {
    throw std::logic_error("make_labels: " + std::to_string(ids.size()) + " ids, " + std::to_string(labels.size()) +
                           " labels");
  }
  if (ids.empty()) return;
  std::copy(ids.begin() + 1, ids.end(), labels.begin());
  labels.back() = kIgnoredLabel;
}

std::unique_ptr<SequenceSource> make_windows(std::shared_ptr<const TokenStream> stream, const WindowOptions& options) {
  return std::make_unique<Windows>(std::move(stream), options);
}

std::unique_ptr<SequenceSource> make_copy_task(const CopyTaskOptions& options) {
  return std::make_unique<CopyTask>(options);
}

std::unique_ptr<SequenceSource> make_random_ids(int64_t sequence_length, int64_t vocab_size, uint64_t seed) {
  return std::make_unique<RandomIds>(sequence_length, vocab_size, seed);
}

}  // namespace oomb::data
