// Where bytes live. Always passed explicitly: guessing from a pointer fails with a statically linked CUDA runtime.
#pragma once

#include <cstdint>

namespace oomb::comm {

enum class MemoryKind : std::uint8_t { kHost, kCuda };
const char* name_of(MemoryKind kind);

}  // namespace oomb::comm
