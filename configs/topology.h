// The machines of a run as typed structs: what topology.file holds.
//
// The fields, their defaults, limits and meanings are the table in topology.def; docs/config.md is printed from it.
// Errors are InputErrors of the form FILE:LINE: section.field: what is wrong; allowed: what would be right.
// A Topology may still hold `auto`; coordinator/plan/resolve.h puts numbers in their place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "configs/run_config.h"

namespace oomb {

/// `auto` or a number.
struct Count {
  bool automatic = true;
  std::int64_t value = 0;  // meaningless when automatic
  static Count of(std::int64_t value) { return {false, value}; }
  bool operator==(const Count&) const = default;
};

/// `auto`, a number of nodes, or their names; then `count` is how many.
struct NodeList {
  bool automatic = true;
  std::int64_t count = 0;
  std::vector<std::string> names;
  bool operator==(const NodeList&) const = default;
};

/// `auto` or a list of distinct names.
struct NameList {
  bool automatic = true;
  std::vector<std::string> names;
  bool operator==(const NameList&) const = default;
};

#define OOMB_STRUCT(Type) struct Type {
#define OOMB_FIELD(Type, name, initial, limits, unit, doc) Type name = initial;
#define OOMB_SECTION(Type, name, doc) Type name;
#define OOMB_END(Type)                          \
  bool operator==(const Type&) const = default; \
  }                                             \
  ;
#include "configs/topology.def"
#undef OOMB_STRUCT
#undef OOMB_FIELD
#undef OOMB_SECTION
#undef OOMB_END

/// Reads a topology file.
Topology load_topology(const std::filesystem::path& file);

/// The same for a text; `name` stands for the file in errors.
Topology parse_topology(std::string_view yaml, const std::string& name);

/// All fields as an indented JSON object, in the order of the table.
std::string to_json(const Topology& topology);

}  // namespace oomb
