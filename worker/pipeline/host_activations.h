// Activations that wait for pass 2 in host memory: KeptActivations::attention of whole chunks, moved by copy engines
// beside the computation.
//
// Per token and layer H + Hq D elements go out in pass 1 and come back in pass 2: for Qwen2.5-7B and 4,096 tokens 59 MB
// against some 4 ms of computation in pass 1 and 12 ms in pass 2, a quarter or less of a PCIe 5 link.
//
// Not thread-safe. Copies run on streams of their own; nothing here waits on the host.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "worker/pipeline/activations.h"
#include "worker/tensor/pinned_memory.h"

namespace oomb {

class HostActivations {
 public:
  /// Of chunks of at most `chunk_tokens`. Memory is taken block by block when chunks are reserved, and kept for the
  /// sequences that follow.
  HostActivations(const model::ModelConfig& config, const at::Device& device, at::ScalarType compute,
                  int64_t chunk_tokens);
  /// Waits for copies under way.
  ~HostActivations();
  HostActivations(const HostActivations&) = delete;
  HostActivations& operator=(const HostActivations&) = delete;

  /// Of one chunk in host memory.
  static int64_t block_bytes(const model::ModelConfig& config, at::ScalarType compute, int64_t chunk_tokens);
  /// Forgets what is stored, for a new sequence of which this worker has `num_chunks`, numbered from 0 here.
  void begin_sequence(int64_t num_chunks);
  /// Room for a chunk; false when the machine has none.
  bool reserve(int64_t chunk);
  bool holds(int64_t chunk) const { return block_of_[static_cast<size_t>(chunk)] >= 0; }

  /// Starts the copies of a.x1 and a.attention of a reserved chunk and lets go of them on the device.
  void store(int64_t chunk, int64_t layer, LayerActivations& a);
  /// The same for the final stream x [C, H].
  void store_final(int64_t chunk, at::Tensor& x);

  /// The inverse, in the order of pass 2: the final stream, then layers from the last to the first. Each call also
  /// starts the copies that come next, over the border to the chunk before if it is held. What comes back may be used
  /// on the current stream.
  at::Tensor fetch_final(int64_t chunk);
  void fetch(int64_t chunk, int64_t layer, LayerActivations& a);

 private:
  // One (chunk, layer), or the final stream as layer L.
  struct Item {
    int64_t chunk = 0, layer = 0;
    at::Tensor x, o, lse;
    std::optional<c10::Event> arrived;
  };
  Item host_item(int64_t chunk, int64_t layer) const;
  void send(at::Tensor& device, const at::Tensor& host);
  Item take(int64_t chunk, int64_t layer);
  void start_next();

  model::ModelConfig config_;
  at::Device device_;
  at::ScalarType compute_;
  int64_t chunk_tokens_;
  std::optional<c10::Stream> out_, in_;
  std::vector<std::unique_ptr<PinnedBlock>> blocks_;
  std::vector<int64_t> block_of_, tokens_of_;  // by chunk; -1: not held
  int64_t blocks_used_ = 0;
  std::deque<Item> coming_;                                // in the order of pass 2
  std::optional<std::pair<int64_t, int64_t>> next_fetch_;  // (chunk, layer) of the next copy to start
};

}  // namespace oomb
