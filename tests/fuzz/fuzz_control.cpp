// The control channel's frames: any stream is cut into messages or refused as malformed, and what was accepted survives
// a round trip.
#include <nlohmann/json.hpp>

#include "comm/control_codec.h"
#include "comm/control_messages.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace oomb;
  std::string_view stream = fuzz::text_of(data, size);
  try {
    while (stream.size() >= comm::kLengthBytes) {
      const std::span<const char, comm::kLengthBytes> head(stream.data(), comm::kLengthBytes);
      const std::size_t length = comm::decode_length(head, comm::kMaxMessageBytes);
      fuzz::require(length > 0 && length <= comm::kMaxMessageBytes, "a length is within the limit");
      stream.remove_prefix(comm::kLengthBytes);
      if (stream.size() < length) break;
      const nlohmann::json message = comm::decode_body(stream.substr(0, length));
      stream.remove_prefix(length);
      fuzz::require(message.is_object() && message.at("type").is_string(), "a message is an object with a type");
      const std::string frame = comm::encode_message(message);
      fuzz::require(comm::decode_body(std::string_view(frame).substr(comm::kLengthBytes)) == message,
                    "a message survives a round trip");
    }
  } catch (const comm::MalformedMessage&) {
  } catch (const std::length_error&) {
    // A message of the largest size may grow when it is written anew: "\u0001" for one byte.
  }
  return 0;
}
