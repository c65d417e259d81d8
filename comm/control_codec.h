// Framing and secrets of the control channel, shared by both ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace oomb::comm {

/// Bytes from a peer that are no message. what() says why, without quoting them.
class MalformedMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kLengthBytes = 4;

/// The frame of a message: length, then JSON. Texts that are not UTF-8 are repaired with U+FFFD; non-finite numbers
/// become null. std::length_error beyond kMaxMessageBytes.
std::string encode_message(const nlohmann::json& message);

/// The body's length from the first kLengthBytes of a frame. MalformedMessage when it is 0 or above `limit`.
std::size_t decode_length(std::span<const char, kLengthBytes> bytes, std::size_t limit);

/// The message of a body. MalformedMessage unless it is a JSON object with a text `type`, nested at most 16 deep.
nlohmann::json decode_body(std::string_view body);

/// 256 random bits of the operating system, as 64 hexadecimal digits.
std::string make_secret();

/// Equality in a time that depends on the lengths only.
bool secrets_equal(std::string_view a, std::string_view b);

}  // namespace oomb::comm
