// Counter-based random bits: a value is a function of (counter, key), so any of them can be made again, in any order,
// on any device, without stored state. Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
// (SC11).
#pragma once

#include <array>
#include <cstdint>

namespace oomb::kernels {

/// Ten rounds of Philox4x32: 128 random bits for a 128-bit counter under a 64-bit key.
[[gnu::always_inline]] constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                                                    std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

}  // namespace oomb::kernels
