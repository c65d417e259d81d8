// Counter-based random numbers: a value is a function of (key, counter), so any of them can be made again, in any order
// and on any machine, without stored state.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/philox.h"

namespace oomb::data {

using kernels::philox4x32;

/// 64 random bits for (seed, stream, index). Different streams of one seed are independent.
constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto r = philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                             static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                            {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (uint64_t{r[1]} << 32) | r[0];
}

/// Uniform integer in [0, bound) for (seed, stream, index); bound ≥ 1. Bias < bound / 2^64.
constexpr uint64_t random_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound) {
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>((static_cast<uint128>(random_bits(seed, stream, index)) * bound) >> 64);
}

/// A keyed permutation of [0, size) in O(1) memory: a balanced Feistel network over the next even number of bits,
/// walked along its cycle until the value falls below `size` (fewer than 4 steps on average).
class Permutation {
 public:
  /// `size` ≥ 1; equal (size, seed, stream) give the same permutation.
  constexpr Permutation(uint64_t size, uint64_t seed, uint64_t stream) : size_(size), seed_(seed), stream_(stream) {
    const int bits = size <= 1 ? 0 : std::bit_width(size - 1);
    half_bits_ = (bits + 1) / 2;
  }

  /// Image of `index`, which must be below `size`.
  constexpr uint64_t operator()(uint64_t index) const {
    if (size_ <= 1) return index;
    uint64_t value = index;
    do {
      value = encrypt(value);
    } while (value >= size_);
    return value;
  }

 private:
  constexpr uint64_t encrypt(uint64_t value) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = value >> half_bits_;
    uint64_t right = value & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      // half_bits_ ≤ 32, so the round number fits above the half in the counter's index.
      const uint64_t next = left ^ (random_bits(seed_, stream_, (round << 40) | right) & mask);
      left = right;
      right = next;
    }
    return (left << half_bits_) | right;
  }

  uint64_t size_;
  uint64_t seed_;
  uint64_t stream_;
  int half_bits_ = 0;
};

}  // namespace oomb::data
