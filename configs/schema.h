// The generated visitors over the tables of settings; private to configs/.
//
// visit_fields(object, visitor) calls, in the order of the table,
//   visitor.field(object.name, FieldInfo{...})      for a setting
//   visitor.section(object.name, "name", "doc")     for a nested section
#pragma once

#include <concepts>
#include <limits>
#include <string>
#include <type_traits>

#include "configs/run_config.h"
#include "configs/topology.h"

namespace oomb::schema {

/// Allowed numbers; open ends exclude the limit itself.
struct Limits {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
  bool high_open = false;
  bool byte_size = false;  // an integer that may carry a unit such as MiB
};

constexpr Limits any() { return {}; }
constexpr Limits at_least(double low) { return {.low = low}; }
constexpr Limits above(double low) { return {.low = low, .low_open = true}; }
constexpr Limits between(double low, double high) { return {.low = low, .high = high}; }
constexpr Limits byte_count() { return {.low = 0, .byte_size = true}; }
constexpr Limits between_open(double low, double high) {
  return {.low = low, .high = high, .low_open = false, .high_open = true};
}

struct FieldInfo {
  const char* name;
  Limits limits;
  const char* unit;
  const char* doc;
};

// One visit_fields for each struct of the tables.
#define OOMB_ENUM(Type)
#define OOMB_VALUE(Type, value, text)
#define OOMB_ENUM_END(Type)
#define OOMB_STRUCT(Type)                                  \
  template <typename Object, typename Visitor>             \
  requires std::same_as<std::remove_const_t<Object>, Type> \
  void visit_fields([[maybe_unused]] Object& object, Visitor&& visitor) {
#define OOMB_FIELD(Type, name, initial, limits, unit, doc) \
  visitor.field(object.name, FieldInfo{#name, limits, unit, doc});
#define OOMB_SECTION(Type, name, doc) visitor.section(object.name, #name, doc);
#define OOMB_END(Type) }
#include "configs/run_config.def"
#include "configs/topology.def"
#undef OOMB_ENUM
#undef OOMB_VALUE
#undef OOMB_ENUM_END
#undef OOMB_STRUCT
#undef OOMB_FIELD
#undef OOMB_SECTION
#undef OOMB_END

}  // namespace oomb::schema
