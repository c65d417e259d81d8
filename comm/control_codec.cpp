#include "comm/control_codec.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "comm/control_messages.h"

namespace oomb::comm {

std::string encode_message(const nlohmann::json& message) {
  const std::string body = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (body.size() > kMaxMessageBytes) {
    throw std::length_error("control message of " + std::to_string(body.size()) + " bytes; at most " +
                            std::to_string(kMaxMessageBytes));
  }
  const auto length = static_cast<std::uint32_t>(body.size());
  std::string frame;
  frame.reserve(kLengthBytes + body.size());
  for (int shift = 24; shift >= 0; shift -= 8) frame.push_back(static_cast<char>((length >> shift) & 0xff));
  return frame + body;
}

std::size_t decode_length(std::span<const char, kLengthBytes> bytes, std::size_t limit) {
  std::uint32_t length = 0;
  for (char byte : bytes) length = (length << 8) | static_cast<unsigned char>(byte);
  if (length == 0) throw MalformedMessage("an empty message");
  if (length > limit) {
    throw MalformedMessage("a message of " + std::to_string(length) + " bytes; at most " + std::to_string(limit));
  }
  return length;
}

nlohmann::json decode_body(std::string_view body) {
  constexpr int kMaxDepth = 16;
  // The callback sees each nested value first, so deep nesting ends the parse rather than the stack.
  const auto depth_guard = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMaxDepth) throw MalformedMessage("a message nested too deeply");
    return true;
  };
  nlohmann::json message;
  try {
    message = nlohmann::json::parse(body, depth_guard);
  } catch (const nlohmann::json::exception&) {
    throw MalformedMessage("a message that is not JSON");
  }
  if (!message.is_object()) throw MalformedMessage("a message that is not a JSON object");
  const auto type = message.find("type");
  if (type == message.end() || !type->is_string()) throw MalformedMessage("a message without a type");
  return message;
}

std::string make_secret() {
  unsigned char bytes[32];
  std::size_t have = 0;
  while (have < sizeof(bytes)) {
    const ssize_t got = getrandom(bytes + have, sizeof(bytes) - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "getrandom");
    have += static_cast<std::size_t>(got);
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

bool secrets_equal(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile keeps the compiler from leaving the loop at the first difference.
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference =
        static_cast<unsigned char>(difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  }
  return difference == 0;
}

}  // namespace oomb::comm
