#include "worker/checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "configs/error.h"

namespace oomb::checkpoint {

nlohmann::json parse_strict_json(std::string_view text, const std::string& where) {
  using Json = nlohmann::json;
  constexpr int kMaxDepth = 64;
  std::vector<std::set<std::string>> keys;
  const Json::parser_callback_t callback = [&](int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth >= kMaxDepth) throw InputError(where + ": JSON nested deeper than " + std::to_string(kMaxDepth));
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!keys.back().insert(parsed.get<std::string>()).second) {
          throw InputError(where + ": JSON key \"" + printable(parsed.get<std::string>()) + "\" occurs twice");
        }
        break;
      case Json::parse_event_t::array_end:
      case Json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), callback);
  } catch (const Json::exception& error) {
    // The library's text has the position; its first word in brackets is its own error number.
    std::string cause = error.what();
    if (const size_t end = cause.find("] "); end != std::string::npos) cause.erase(0, end + 2);
    throw InputError(where + ": not valid JSON: " + printable(cause));
  }
}

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 100;
  std::string line(text.substr(0, kLongest));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return text.size() > kLongest ? line + "..." : line;
}

}  // namespace oomb::checkpoint
