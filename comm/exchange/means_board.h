// What other workers have published of one sequence: means until they are taken, addresses until the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/exchange/keys.h"

namespace oomb::comm {

/// Memory: 16 bytes per layer and page, and the means that were not taken. Not thread-safe.
class MeansBoard {
 public:
  explicit MeansBoard(const SequenceShape& shape);

  /// False when it was there already: nothing changes. ProtocolError when layer or chunk do not exist or the number of
  /// addresses is not pages_of(chunk).
  bool put(std::int64_t layer, std::int64_t chunk, std::span<const RemoteAddress> pages,
           std::span<const std::byte> means);
  /// Whether take() would give means.
  bool has_means(std::int64_t layer, std::int64_t chunk) const;
  /// Whether it was put, taken since or not.
  bool published(std::int64_t layer, std::int64_t chunk) const;
  /// std::logic_error unless has_means().
  std::vector<std::byte> take(std::int64_t layer, std::int64_t chunk);
  /// std::logic_error unless published.
  RemoteAddress address_of(std::int64_t layer, std::int64_t page) const;
  std::int64_t held_bytes() const { return held_bytes_; }

 private:
  enum class State : std::uint8_t { kAbsent, kWaiting, kTaken };
  struct Entry {
    State state = State::kAbsent;
    std::vector<std::byte> means;
  };
  std::size_t index(std::int64_t layer, std::int64_t chunk) const;
  bool exists(std::int64_t layer, std::int64_t chunk) const;

  SequenceShape shape_;
  std::vector<Entry> entries_;            // [num_layers, num_chunks]
  std::vector<RemoteAddress> addresses_;  // [num_layers, num_pages]
  std::int64_t held_bytes_ = 0;
};

}  // namespace oomb::comm
