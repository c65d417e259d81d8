// What one worker moved and waited for, by layer and pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oomb::cluster {

enum class ExchangePass : uint8_t { pass1, pass2, evaluation };
inline constexpr int kNumExchangePasses = 3;
const char* name_of(ExchangePass pass);

/// Pages are K/V pages of other workers, read by this one; contributions are gradients of this worker's pages, fetched
/// from others. Bytes are those of gets and of means received, without envelopes.
struct ExchangeCounts {
  int64_t pages_fetched = 0, page_hits = 0, page_bytes = 0;
  int64_t contributions_sent = 0;  ///< pages announced to others
  int64_t contributions_fetched = 0, contribution_bytes = 0;
  int64_t means_received = 0, means_bytes = 0;                           ///< chunks of others
  double means_seconds = 0, page_seconds = 0, contribution_seconds = 0;  ///< waiting

  ExchangeCounts& operator+=(const ExchangeCounts& other);
};

/// Bytes that one worker would receive in a step for one sequence in one-shot ring attention, N/W tokens a worker,
/// zig-zag order, per-layer checkpointing, all layers: keys and values go around (W - 1 hops) in the forward, when it
/// is computed again, and in the backward, where their gradients make W hops. Liu et al., "Ring Attention with
/// Blockwise Transformers" (arXiv 2310.01889), section 3; coordinator/plan/traffic.h plans with the same.
/// `token_bytes`: keys and values of a token at one layer.
double ring_bytes(int64_t num_tokens, int64_t num_layers, int num_workers, int64_t token_bytes,
                  int64_t token_gradient_bytes);

/// [kNumExchangePasses][num_layers].
class ExchangeLedger {
 public:
  explicit ExchangeLedger(int64_t num_layers)
      : num_layers_(num_layers), counts_(static_cast<size_t>(num_layers * kNumExchangePasses)) {}

  ExchangeCounts& at(ExchangePass pass, int64_t layer) {
    return counts_[static_cast<size_t>(static_cast<int64_t>(pass) * num_layers_ + layer)];
  }
  const ExchangeCounts& at(ExchangePass pass, int64_t layer) const {
    return const_cast<ExchangeLedger*>(this)->at(pass, layer);
  }
  ExchangeCounts total() const;
  int64_t num_layers() const { return num_layers_; }

  /// Most pages that one chunk fetched for one layer in one pass.
  int64_t most_pages_per_chunk = 0;

 private:
  int64_t num_layers_;
  std::vector<ExchangeCounts> counts_;
};

}  // namespace oomb::cluster
