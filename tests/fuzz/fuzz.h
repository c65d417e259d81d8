// Fuzz targets: each takes any bytes and must neither crash, hang, nor break the property that it states.
//
// A target is one LLVMFuzzerTestOneInput. Built by Clang it is linked with libFuzzer, which is guided by coverage;
// built by another compiler, with driver.cpp, which replays a corpus and mutates it at random from a fixed seed. Both
// take a corpus folder and the time to spend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace oomb::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A property that an input breaks ends the process, as a crash does.
inline void require(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken: %s\n", property);
  std::abort();
}

}  // namespace oomb::fuzz
