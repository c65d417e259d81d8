// Bodies of messages: fixed-size values in the byte order of the machine, which all workers share.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/errors.h"

namespace oomb::comm {

class WireWriter {
 public:
  explicit WireWriter(std::size_t expected_bytes) { bytes_.reserve(expected_bytes); }
  template <class T>
  void put(const T& value) {
    static_assert(std::is_arithmetic_v<T>);
    put_bytes(std::as_bytes(std::span(&value, 1)));
  }
  void put_bytes(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads what a WireWriter wrote; ProtocolError when the body is too short.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    static_assert(std::is_arithmetic_v<T>);
    T value;
    std::memcpy(&value, get_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> get_bytes(std::size_t count) {
    if (count > bytes_.size()) {
      throw ProtocolError("a message ends after " + std::to_string(bytes_.size()) + " bytes where " +
                          std::to_string(count) + " more are due");
    }
    const auto part = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return part;
  }
  std::span<const std::byte> rest() const { return bytes_; }
  /// ProtocolError unless everything was read.
  void expect_end() const {
    if (!bytes_.empty()) throw ProtocolError("a message has " + std::to_string(bytes_.size()) + " bytes too many");
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace oomb::comm
