#include "coordinator/control/answers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "coordinator/control/run_error.h"

namespace oomb::control {
namespace {

using nlohmann::json;

enum class Rule { kEqual, kSum, kMaximum, kRankZero, kListed };

constexpr std::array<std::string_view, 11> kEqualKeys = {"type",          "step",       "loss",        "tokens",
                                                         "labels",        "grad_norm",  "lr",          "parameters",
                                                         "tokens_crc32c", "checkpoint", "resumed_step"};

Rule rule_of(std::string_view key) {
  if (std::find(kEqualKeys.begin(), kEqualKeys.end(), key) != kEqualKeys.end()) return Rule::kEqual;
  if (key == "bytes" || key.ends_with("_bytes")) return Rule::kSum;
  if (key == "seconds" || key.ends_with("_seconds")) return Rule::kMaximum;
  if (key == "path" || key == "lines") return Rule::kRankZero;
  return Rule::kListed;
}

std::string shown(const json& value) {
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

bool agree(const json& a, const json& b) {
  if (!a.is_number() || !b.is_number() || (a.is_number_integer() && b.is_number_integer())) return a == b;
  const double x = a.get<double>(), y = b.get<double>();
  return std::abs(x - y) <= kAgreement * std::max(std::abs(x), std::abs(y));
}

// The values of a key in the order of ranks; null where a worker does not tell it.
std::vector<json> values_of(const std::vector<json>& by_rank, const std::string& key) {
  std::vector<json> values;
  for (const json& answer : by_rank) values.push_back(answer.value(key, json()));
  return values;
}

json common_value(const std::string& key, const std::vector<json>& values) {
  for (std::size_t rank = 1; rank < values.size(); ++rank) {
    if (agree(values[0], values[rank])) continue;
    throw WorkerLost("workers disagree: " + key + " is " + shown(values[0]) + " on rank 0 and " + shown(values[rank]) +
                     " on rank " + std::to_string(rank));
  }
  return values[0];
}

json reduced(const std::string& key, const std::vector<json>& values, Rule rule) {
  json result;
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    const json& value = values[rank];
    if (value.is_null()) return {};
    if (!value.is_number()) {
      throw WorkerLost("the worker broke the protocol: " + key + " of rank " + std::to_string(rank) + " is " +
                       shown(value) + ", not a number");
    }
    if (rank == 0) {
      result = value;
    } else if (rule == Rule::kMaximum) {
      result = std::max(result, value);
    } else if (result.is_number_integer() && value.is_number_integer()) {
      result = result.get<std::int64_t>() + value.get<std::int64_t>();
    } else {
      result = result.get<double>() + value.get<double>();
    }
  }
  return result;
}

}  // namespace

json merge_answers(const std::vector<json>& by_rank) {
  json merged = by_rank.front();
  // Every key that somebody tells: one that rank 0 leaves out is a disagreement too.
  for (const json& answer : by_rank) {
    for (const auto& [key, value] : answer.items()) merged.emplace(key, json());
  }
  for (auto& [key, result] : merged.items()) {
    const std::vector<json> values = values_of(by_rank, key);
    switch (const Rule rule = rule_of(key)) {
      case Rule::kEqual:
        result = common_value(key, values);
        break;
      case Rule::kSum:
      case Rule::kMaximum:
        result = reduced(key, values, rule);
        break;
      case Rule::kRankZero:
        result = values[0];
        break;
      case Rule::kListed:
        result = std::all_of(values.begin(), values.end(), [&](const json& v) { return v == values[0]; })
                     ? values[0]
                     : json(values);
        break;
    }
  }
  return merged;
}

}  // namespace oomb::control
