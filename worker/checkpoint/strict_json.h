// JSON for files that come from outside. Internal to the .cpp files of the worker.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace oomb::checkpoint {

/// Parses one JSON document. InputError, beginning with `where`, on bad syntax, bad UTF-8, a key that occurs twice in
/// one object, or nesting beyond 64 levels.
nlohmann::json parse_strict_json(std::string_view text, const std::string& where);

/// `text` fit for a message of one line: control characters replaced, cut after 100 bytes.
std::string printable(std::string_view text);

}  // namespace oomb::checkpoint
