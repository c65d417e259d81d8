// Single values of the settings: their text forms, what is allowed, and the checks; private to configs/.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "configs/document.h"
#include "configs/run_config.h"
#include "configs/schema.h"
#include "configs/topology.h"

namespace oomb::schema {

template <typename T>
concept Enumeration = std::is_enum_v<T>;

/// Where a value stands, for its errors and for relative paths.
struct ValueContext {
  std::string path;              // section.field
  std::filesystem::path folder;  // absolute; of the run file
};

// `allowed` says in words what a field takes; `parse` reads and checks it; `write` is its JSON form, which parse reads
// back to an equal value; `shown` is the JSON form for people.
std::string allowed(const bool&, const Limits&);
std::string allowed(const std::int64_t&, const Limits&);
std::string allowed(const double&, const Limits&);
std::string allowed(const std::string&, const Limits&);
std::string allowed(const std::filesystem::path&, const Limits&);
std::string allowed(const std::vector<std::string>&, const Limits&);
std::string allowed(const std::vector<std::filesystem::path>&, const Limits&);
std::string allowed(const ByteSize&, const Limits&);
std::string allowed(const Interval&, const Limits&);
std::string allowed(const Resume&, const Limits&);
std::string allowed(const Count&, const Limits&);
std::string allowed(const NodeList&, const Limits&);
std::string allowed(const NameList&, const Limits&);

void parse(const Node& node, const Limits&, const ValueContext&, bool& value);
void parse(const Node& node, const Limits&, const ValueContext&, std::int64_t& value);
void parse(const Node& node, const Limits&, const ValueContext&, double& value);
void parse(const Node& node, const Limits&, const ValueContext&, std::string& value);
void parse(const Node& node, const Limits&, const ValueContext&, std::filesystem::path& value);
void parse(const Node& node, const Limits&, const ValueContext&, std::vector<std::string>& value);
void parse(const Node& node, const Limits&, const ValueContext&, std::vector<std::filesystem::path>& value);
void parse(const Node& node, const Limits&, const ValueContext&, ByteSize& value);
void parse(const Node& node, const Limits&, const ValueContext&, Interval& value);
void parse(const Node& node, const Limits&, const ValueContext&, Resume& value);
void parse(const Node& node, const Limits&, const ValueContext&, Count& value);
void parse(const Node& node, const Limits&, const ValueContext&, NodeList& value);
void parse(const Node& node, const Limits&, const ValueContext&, NameList& value);

nlohmann::ordered_json write(const bool&);
nlohmann::ordered_json write(const std::int64_t&);
nlohmann::ordered_json write(const double&);
nlohmann::ordered_json write(const std::string&);
nlohmann::ordered_json write(const std::filesystem::path&);
nlohmann::ordered_json write(const std::vector<std::string>&);
nlohmann::ordered_json write(const std::vector<std::filesystem::path>&);
nlohmann::ordered_json write(const ByteSize&);
nlohmann::ordered_json write(const Interval&);
nlohmann::ordered_json write(const Resume&);
nlohmann::ordered_json write(const Count&);
nlohmann::ordered_json write(const NodeList&);
nlohmann::ordered_json write(const NameList&);

/// Throws the error of a value that is not what `permitted` says.
[[noreturn]] void refuse(const Node& node, const std::string& path, const std::string& permitted);

/// The text of a scalar; an error for lists, maps and missing values.
const std::string& scalar_text(const Node& node, const std::string& path, const std::string& permitted);

/// The nearest of `known` to a mistyped word; empty when none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& known);

template <Enumeration E>
std::string allowed(const E&, const Limits&) {
  std::string text;
  for (E value : EnumTable<E>::values) text += (text.empty() ? "" : ", ") + std::string(to_string(value));
  return text;
}

template <Enumeration E>
void parse(const Node& node, const Limits& limits, const ValueContext& context, E& value) {
  const std::string permitted = allowed(value, limits);
  const std::string& text = scalar_text(node, context.path, permitted);
  for (E candidate : EnumTable<E>::values) {
    if (text == to_string(candidate)) {
      value = candidate;
      return;
    }
  }
  refuse(node, context.path, permitted);
}

template <Enumeration E>
nlohmann::ordered_json write(const E& value) {
  return std::string(to_string(value));
}

}  // namespace oomb::schema
