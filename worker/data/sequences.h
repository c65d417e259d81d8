// Training and held-out sequences of N tokens, addressed by one integer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "worker/data/token_stream.h"

namespace oomb::data {

/// Label of a token that has no next token to predict, or whose prediction does not count.
inline constexpr int64_t kIgnoredLabel = -100;

/// labels[i] = ids[i+1], the last one kIgnoredLabel: a sequence of N tokens has N−1 labels (N = 1: none).
/// Shift the whole sequence first and cut ids and labels together afterwards. A piece that is shifted by itself loses
/// the label on its right border. `labels` and `ids` have equal sizes and do not overlap.
void make_labels(std::span<const int64_t> ids, std::span<int64_t> labels);

/// An endless series of sequences. The data position of a run is the index of its next sequence and nothing else: the
/// same index gives the same ids in every run. Const members may be called from any thread.
class SequenceSource {
 public:
  virtual ~SequenceSource() = default;
  /// Sequences of one epoch, ≥ 1; index i belongs to epoch i / num_sequences().
  virtual int64_t num_sequences() const = 0;
  /// N, the tokens of each sequence.
  virtual int64_t sequence_length() const = 0;
  /// A vocabulary of this size holds every id.
  virtual int64_t vocab_size_needed() const = 0;
  /// Writes sequence `index` (≥ 0, beyond the first epoch too) to `ids`, which has sequence_length() elements.
  virtual void get(int64_t index, std::span<int64_t> ids) const = 0;
};

enum class Split { kTrain, kHeldOut };

struct WindowOptions {
  int64_t sequence_length = 0;
  Split split = Split::kTrain;
  /// The last round(fraction · size) tokens of the stream are held out, 0 ≤ fraction < 1. No training window touches
  /// them.
  double held_out_fraction = 0;
  uint64_t seed = 0;
  /// False: training windows in stream order from the first token, the same in every epoch.
  bool shuffle = true;
};

/// Windows of N tokens that do not overlap. Training: their order is a permutation keyed by (seed, epoch), and their
/// common offset inside the remainder that no window covers is keyed the same way, so that borders move from epoch to
/// epoch. Held out: in stream order, the same in every epoch.
/// Throws InputError naming both sizes when the split holds less than one sequence.
std::unique_ptr<SequenceSource> make_windows(std::shared_ptr<const TokenStream> stream, const WindowOptions& options);

struct CopyTaskOptions {
  int64_t sequence_length = 0;
  /// Ids 0 … alphabet − 1, uniform. ≥ 2.
  int64_t alphabet = 0;
  uint64_t seed = 0;
  /// 0, or the chunk size: the copy must lie outside the chunk, ceil(N/2) > chunk_tokens, else InputError.
  int64_t chunk_tokens = 0;
  Split split = Split::kTrain;
  /// Only names the length of an epoch; every index is a new sequence.
  int64_t sequences_per_epoch = 1000;
};

/// The copy task: with h = ceil(N/2), ids[0..h) are random and ids[i] = ids[i−h] for i ≥ h, keyed by (seed, split,
/// index). Labels h−1 … N−2 are copies; the one at h−1 can be told from its position only.
std::unique_ptr<SequenceSource> make_copy_task(const CopyTaskOptions& options);

/// Uniform ids 0 ... vocab_size - 1 without any structure, keyed by (seed, index): for measuring speed. Both sizes
/// >= 1.
std::unique_ptr<SequenceSource> make_random_ids(int64_t sequence_length, int64_t vocab_size, uint64_t seed);

}  // namespace oomb::data
