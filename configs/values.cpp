#include "configs/values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

namespace oomb::schema {
namespace {

// The shortest decimal text that reads back as the same number.
std::string number_text(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

// All of the text is a finite number in decimal.
bool read_number(std::string_view text, double& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size() && std::isfinite(value);
}

bool read_integer(std::string_view text, std::int64_t& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

bool inside(double value, const Limits& limits) {
  return (limits.low_open ? value > limits.low : value >= limits.low) &&
         (limits.high_open ? value < limits.high : value <= limits.high);
}

std::string allowed_number(const std::string& kind, const Limits& limits) {
  const auto limit_text = [](double limit) {
    return std::abs(limit) < 1e15 && limit == std::floor(limit) ? std::to_string(static_cast<std::int64_t>(limit))
                                                                : number_text(limit);
  };
  if (limits.low == limits.high) return "only " + limit_text(limits.low);
  std::string text = kind;
  if (std::isfinite(limits.low)) text += (limits.low_open ? " > " : " >= ") + limit_text(limits.low);
  if (std::isfinite(limits.low) && std::isfinite(limits.high)) text += " and";
  if (std::isfinite(limits.high)) text += (limits.high_open ? " < " : " <= ") + limit_text(limits.high);
  return text;
}

// A number and the unit that follows it, such as 8 and "GiB".
bool split_unit(const std::string& text, double& number, std::string& unit) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || !std::isfinite(number)) return false;
  std::string_view rest(result.ptr, static_cast<std::size_t>(text.data() + text.size() - result.ptr));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  unit = std::string(rest);
  return true;
}

struct Unit {
  const char* text;
  double factor;
};

constexpr Unit kByteUnits[] = {{"", 1.0},       {"B", 1.0},      {"kB", 1e3},    {"KB", 1e3},
                               {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},   {"KiB", 0x1p10},
                               {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
constexpr Unit kTimeUnits[] = {{"s", 1}, {"min", 60}, {"h", 3600}, {"d", 86400}};

std::filesystem::path absolute(const std::string& text, const std::filesystem::path& folder) {
  return (folder / text).lexically_normal();
}

// A whole, non-negative number of bytes, with or without a unit.
bool read_bytes(const std::string& text, std::int64_t& value) {
  if (read_integer(text, value)) return value >= 0;  // exact beyond 2^53, too
  double number = 0;
  std::string unit;
  if (!split_unit(text, number, unit)) return false;
  for (const Unit& candidate : kByteUnits) {
    if (unit != candidate.text) continue;
    const double bytes = std::round(number * candidate.factor);
    if (bytes < 0 || bytes >= 0x1p63) return false;
    value = static_cast<std::int64_t>(bytes);
    return true;
  }
  return false;
}

const std::vector<Node>& list_items(const Node& node, const ValueContext& context, const std::string& permitted) {
  if (node.kind != Node::Kind::kList) refuse(node, context.path, permitted);
  return node.items;
}

ValueContext item_context(const ValueContext& context, std::size_t index) {
  return {context.path + "[" + std::to_string(index) + "]", context.folder};
}

// At least one name, none empty, none twice.
std::vector<std::string> distinct_names(const Node& node, const ValueContext& context, const std::string& permitted) {
  std::vector<std::string> names;
  for (const Node& item : list_items(node, context, permitted)) {
    const ValueContext inner = item_context(context, names.size());
    const std::string& name = scalar_text(item, inner.path, permitted);
    if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) refuse(item, inner.path, permitted);
    names.push_back(name);
  }
  if (names.empty()) refuse(node, context.path, permitted);
  return names;
}

}  // namespace

void refuse(const Node& node, const std::string& path, const std::string& permitted) {
  std::string found;
  switch (node.kind) {
    case Node::Kind::kNull:
      found = "no value";
      break;
    case Node::Kind::kScalar: {
      std::string text = node.scalar.substr(0, 100);
      std::replace_if(
          text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
      found = (node.quoted ? "the text \"" + text + "\"" : text) + " is not allowed";
      break;
    }
    case Node::Kind::kList:
      found = "a list is not allowed";
      break;
    case Node::Kind::kMap:
      found = "a map is not allowed";
      break;
  }
  fail(node.where, path, found + "; allowed: " + permitted);
}

const std::string& scalar_text(const Node& node, const std::string& path, const std::string& permitted) {
  if (node.kind != Node::Kind::kScalar) refuse(node, path, permitted);
  return node.scalar;
}

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  std::string best;
  std::size_t best_distance = word.size() / 3 + 2;  // farther words are no help
  for (const std::string& candidate : known) {
    std::vector<std::size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 1; i <= word.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i;
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        const std::size_t above_left = diagonal + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, above_left});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

// --- what is allowed, in words -------------------------------------------------------------------------------------

std::string allowed(const bool&, const Limits&) { return "true, false"; }
std::string allowed(const std::int64_t&, const Limits& limits) {
  return limits.byte_size ? "a size such as 8GiB, 512MiB, 1e9 or 0" : allowed_number("an integer", limits);
}
std::string allowed(const double&, const Limits& limits) { return allowed_number("a number", limits); }
std::string allowed(const std::string&, const Limits&) { return "a text"; }
std::string allowed(const std::filesystem::path&, const Limits&) { return "a path"; }
std::string allowed(const std::vector<std::string>&, const Limits&) { return "a list of texts, such as [a, b]"; }
std::string allowed(const std::vector<std::filesystem::path>&, const Limits&) {
  return "a list of paths, such as [a, b]";
}
std::string allowed(const ByteSize&, const Limits&) { return "auto, or a size such as 8GiB, 512MiB, 1e9 or 0"; }
std::string allowed(const Interval&, const Limits&) {
  return "a number of steps such as 100, or a time such as 90s, 10min or 2h, or 0";
}
std::string allowed(const Resume&, const Limits&) { return "auto, never, or a path"; }
std::string allowed(const Count&, const Limits& limits) { return "auto, or " + allowed_number("an integer", limits); }
std::string allowed(const NodeList&, const Limits& limits) {
  return "auto, " + allowed_number("an integer", limits) + ", or a list of distinct names, such as [a, b]";
}
std::string allowed(const NameList&, const Limits&) { return "auto, or a list of distinct names, such as [a, b]"; }

// --- parsing -------------------------------------------------------------------------------------------------------

void parse(const Node& node, const Limits& limits, const ValueContext& context, bool& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  if (node.quoted || (text != "true" && text != "false")) refuse(node, context.path, permitted);
  value = text == "true";
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, std::int64_t& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  std::int64_t number = 0;
  const bool read = limits.byte_size ? read_bytes(text, number) : !node.quoted && read_integer(text, number);
  if (!read || !inside(static_cast<double>(number), limits)) {
    refuse(node, context.path, permitted);
  }
  value = number;
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, double& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  double number = 0;
  if (node.quoted || !read_number(text, number) || !inside(number, limits)) refuse(node, context.path, permitted);
  value = number;
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, std::string& value) {
  value = scalar_text(node, context.path, allowed(value, limits));
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, std::filesystem::path& value) {
  const std::string& text = scalar_text(node, context.path, allowed(value, limits));
  value = text.empty() ? std::filesystem::path() : absolute(text, context.folder);
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, std::vector<std::string>& value) {
  std::vector<std::string> list;
  for (const Node& item : list_items(node, context, allowed(value, limits))) {
    parse(item, limits, item_context(context, list.size()), list.emplace_back());
  }
  value = std::move(list);
}

void parse(const Node& node, const Limits& limits, const ValueContext& context,
           std::vector<std::filesystem::path>& value) {
  std::vector<std::filesystem::path> list;
  for (const Node& item : list_items(node, context, allowed(value, limits))) {
    const ValueContext inner = item_context(context, list.size());
    parse(item, limits, inner, list.emplace_back());
    if (list.back().empty()) refuse(item, inner.path, "a path that is not empty");
  }
  value = std::move(list);
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, ByteSize& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  if (text == "auto") {
    value = ByteSize{};
    return;
  }
  std::int64_t bytes = 0;
  if (read_bytes(text, bytes)) {
    value = ByteSize::of(bytes);
    return;
  }
  refuse(node, context.path, permitted);
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, Interval& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  std::int64_t steps = 0;
  if (read_integer(text, steps) && steps >= 0) {
    value = Interval{steps, 0};
    return;
  }
  double number = 0;
  std::string unit;
  if (split_unit(text, number, unit) && number > 0) {
    for (const Unit& candidate : kTimeUnits) {
      if (unit != candidate.text || !std::isfinite(number * candidate.factor)) continue;
      value = Interval{0, number * candidate.factor};
      return;
    }
  }
  refuse(node, context.path, permitted);
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, Resume& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  if (text.empty()) refuse(node, context.path, permitted);
  if (text == "auto") {
    value = Resume{};
  } else if (text == "never") {
    value = Resume{Resume::Kind::kNever, {}};
  } else {
    value = Resume{Resume::Kind::kPath, absolute(text, context.folder)};
  }
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, Count& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  std::int64_t number = 0;
  if (text == "auto") {
    value = Count{};
  } else if (!node.quoted && read_integer(text, number) && inside(static_cast<double>(number), limits)) {
    value = Count::of(number);
  } else {
    refuse(node, context.path, permitted);
  }
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, NodeList& value) {
  const std::string permitted = allowed(value, limits);
  if (node.kind == Node::Kind::kList) {
    value = NodeList{false, 0, distinct_names(node, context, permitted)};
    value.count = static_cast<std::int64_t>(value.names.size());
    return;
  }
  const std::string& text = scalar_text(node, context.path, permitted);
  std::int64_t number = 0;
  if (text == "auto") {
    value = NodeList{};
  } else if (!node.quoted && read_integer(text, number) && inside(static_cast<double>(number), limits)) {
    value = NodeList{false, number, {}};
  } else {
    refuse(node, context.path, permitted);
  }
}

void parse(const Node& node, const Limits& limits, const ValueContext& context, NameList& value) {
  const std::string permitted = allowed(value, limits);
  if (node.kind == Node::Kind::kList) {
    value = NameList{false, distinct_names(node, context, permitted)};
    return;
  }
  if (scalar_text(node, context.path, permitted) != "auto") refuse(node, context.path, permitted);
  value = NameList{};
}

// --- JSON ----------------------------------------------------------------------------------------------------------

nlohmann::ordered_json write(const bool& value) { return value; }
nlohmann::ordered_json write(const std::int64_t& value) { return value; }
nlohmann::ordered_json write(const double& value) { return value; }
nlohmann::ordered_json write(const std::string& value) { return value; }
nlohmann::ordered_json write(const std::filesystem::path& value) { return value.string(); }
nlohmann::ordered_json write(const std::vector<std::string>& value) { return value; }
nlohmann::ordered_json write(const std::vector<std::filesystem::path>& value) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const std::filesystem::path& path : value) list.push_back(path.string());
  return list;
}
nlohmann::ordered_json write(const ByteSize& value) {
  if (value.automatic) return "auto";
  return value.bytes;
}
nlohmann::ordered_json write(const Interval& value) {
  if (value.seconds > 0) return number_text(value.seconds) + "s";
  return value.steps;
}
nlohmann::ordered_json write(const Resume& value) {
  switch (value.kind) {
    case Resume::Kind::kAuto:
      return "auto";
    case Resume::Kind::kNever:
      return "never";
    case Resume::Kind::kPath:
      return value.path.string();
  }
  return nullptr;
}

nlohmann::ordered_json write(const Count& value) {
  if (value.automatic) return "auto";
  return value.value;
}
nlohmann::ordered_json write(const NodeList& value) {
  if (value.automatic) return "auto";
  if (!value.names.empty()) return value.names;
  return value.count;
}
nlohmann::ordered_json write(const NameList& value) {
  if (value.automatic) return "auto";
  return value.names;
}

}  // namespace oomb::schema
