// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), the checksum of checkpoint files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace oomb::checkpoint {

/// CRC of `bytes` continued from `crc`, the CRC of everything before (0 to begin): crc32c(b, crc32c(a)) is that of ab.
/// Uses the processor's instruction where it has one.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

/// The same from tables, on any machine.
uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t crc = 0);

}  // namespace oomb::checkpoint
