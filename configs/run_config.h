// A run's settings as typed structs: `config.train.steps` in C++ is `train: {steps: ...}` in the run file.
//
// The fields, their defaults, limits and meanings are the table in run_config.def; docs/config.md is printed from it.
// A RunConfig returned by the functions below is complete (paths absolute, empty names filled in) and has passed every
// check that needs no other file. Errors are InputErrors of the form
//   FILE:LINE: section.field: what is wrong; allowed: what would be right
// where FILE:LINE is `--set section.field=value` for an override. No function here opens a file but the run file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oomb {

/// A size in bytes: in files `8GiB`, `512MiB`, `1e9`, `0`, or `auto` (what is really left).
struct ByteSize {
  bool automatic = true;
  std::int64_t bytes = 0;  // meaningless when automatic
  static ByteSize of(std::int64_t bytes) { return {false, bytes}; }
  bool operator==(const ByteSize&) const = default;
};

/// A period in steps (`100`) or in time (`90s`, `10min`, `2h`); both 0 means never.
struct Interval {
  std::int64_t steps = 0;
  double seconds = 0;
  bool operator==(const Interval&) const = default;
};

/// Where training goes on from: `auto`, `never`, or the path of a checkpoint.
struct Resume {
  enum class Kind { kAuto, kNever, kPath };
  Kind kind = Kind::kAuto;
  std::filesystem::path path;  // absolute; only for kPath
  bool operator==(const Resume&) const = default;
};

// The enumerations, `to_string(value)`, and `EnumTable<E>::values` with all values in order.
template <typename E>
struct EnumTable;

#define OOMB_STRUCT(Type) struct Type;
#define OOMB_FIELD(Type, name, initial, limits, unit, doc)
#define OOMB_SECTION(Type, name, doc)
#define OOMB_END(Type)

#define OOMB_ENUM(Type) enum class Type {
#define OOMB_VALUE(Type, value, text) value,
#define OOMB_ENUM_END(Type) \
  }                         \
  ;
#include "configs/run_config.def"
#undef OOMB_ENUM
#undef OOMB_VALUE
#undef OOMB_ENUM_END

#define OOMB_ENUM(Type)                          \
  constexpr std::string_view to_string(Type v) { \
    switch (v) {
#define OOMB_VALUE(Type, value, text) \
  case Type::value:                   \
    return text;
#define OOMB_ENUM_END(Type) \
  }                         \
  return "?";               \
  }
#include "configs/run_config.def"
#undef OOMB_ENUM
#undef OOMB_VALUE
#undef OOMB_ENUM_END

#define OOMB_ENUM(Type)    \
  template <>              \
  struct EnumTable<Type> { \
    static constexpr Type values[] = {
#define OOMB_VALUE(Type, value, text) Type::value,
#define OOMB_ENUM_END(Type) \
  }                         \
  ;                         \
  }                         \
  ;
#include "configs/run_config.def"
#undef OOMB_ENUM
#undef OOMB_VALUE
#undef OOMB_ENUM_END
#undef OOMB_STRUCT
#undef OOMB_FIELD
#undef OOMB_SECTION
#undef OOMB_END

// The structs: RunConfig and its sections.
#define OOMB_ENUM(Type)
#define OOMB_VALUE(Type, value, text)
#define OOMB_ENUM_END(Type)
#define OOMB_STRUCT(Type) struct Type {
#define OOMB_FIELD(Type, name, initial, limits, unit, doc) Type name = initial;
#define OOMB_SECTION(Type, name, doc) Type name;
#define OOMB_END(Type)                          \
  bool operator==(const Type&) const = default; \
  }                                             \
  ;
#include "configs/run_config.def"
#undef OOMB_ENUM
#undef OOMB_VALUE
#undef OOMB_ENUM_END
#undef OOMB_STRUCT
#undef OOMB_FIELD
#undef OOMB_SECTION
#undef OOMB_END

/// Reads a run file. `overrides` are texts `section.field=value`, applied in order after the file; the value is written
/// as in YAML. Relative paths, those of overrides too, are taken from the run file's folder.
RunConfig load_run_config(const std::filesystem::path& file, std::span<const std::string> overrides = {});

/// The same for a text. `name` stands in for the file in errors; relative paths are taken from `folder` (absolute).
RunConfig parse_run_config(std::string_view yaml, const std::string& name, const std::filesystem::path& folder,
                           std::span<const std::string> overrides = {});

/// All fields as an indented JSON object, in the order of the table.
std::string to_json(const RunConfig& config);

/// The exact inverse of to_json, with the same checks as a run file. Absent fields have their defaults.
RunConfig run_config_from_json(std::string_view json);

/// Markdown with every field: default, unit, what is allowed, meaning.
std::string config_reference();

}  // namespace oomb
