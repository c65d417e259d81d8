#include "worker/checkpoint/crc32c.h"

#include <array>
#include <cstring>

namespace oomb::checkpoint {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

/// kTables[k][b]: the CRC register after byte b and then k zero bytes, so eight bytes take eight independent look-ups.
using Tables = std::array<std::array<uint32_t, 256>, 8>;
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xFF];
    }
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint64_t load64(const std::byte* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(std::span<const std::byte> bytes, uint32_t crc) {
  uint64_t state = ~crc;
  const std::byte* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; p += 8, left -= 8) state = __builtin_ia32_crc32di(state, load64(p));
  auto small = static_cast<uint32_t>(state);
  for (; left > 0; ++p, --left) small = __builtin_ia32_crc32qi(small, static_cast<unsigned char>(*p));
  return ~small;
}
#endif

}  // namespace

uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t state = ~crc;
  const std::byte* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; p += 8, left -= 8) {
    const uint64_t word = load64(p) ^ state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; left > 0; ++p, --left) state = (state >> 8) ^ kTables[0][(state ^ static_cast<uint32_t>(*p)) & 0xFF];
  return ~state;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return crc32c_sse42(bytes, crc);
#endif
  return crc32c_portable(bytes, crc);
}

}  // namespace oomb::checkpoint
