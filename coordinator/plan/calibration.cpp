#include "coordinator/plan/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "configs/error.h"

namespace oomb::plan {
namespace {

using nlohmann::json;

constexpr std::streamsize kMaxBytes = 16 << 20;

std::optional<double> number_at(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return std::nullopt;
  const json& value = found->is_object() && found->contains("median") ? (*found)["median"] : *found;
  if (!value.is_number() || !(value.get<double>() > 0) || !std::isfinite(value.get<double>())) return std::nullopt;
  return value.get<double>();
}

void collect(const json& value, std::vector<MeasuredStep>& steps) {
  if (value.is_object()) {
    const auto speed = number_at(value, "tokens_per_second");
    for (const char* key : {"length", "sequence_length", "tokens"}) {
      const auto length = number_at(value, key);
      if (!speed || !length || *length > 1e15) continue;
      steps.push_back({std::llround(*length), *speed});
      break;
    }
  }
  if (!value.is_structured()) return;
  for (const json& inner : value) collect(inner, steps);
}

}  // namespace

const MeasuredStep& Calibration::nearest(std::int64_t length) const {
  const auto distance = [&](const MeasuredStep& step) {
    return std::abs(std::log(static_cast<double>(step.length) / static_cast<double>(length)));
  };
  return *std::min_element(steps.begin(), steps.end(),
                           [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
}

Calibration parse_calibration(const std::string& text, const std::string& name) {
  Calibration calibration{name, {}};
  const json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) throw InputError(name + ": not JSON; allowed: what `oomb bench --json` writes");
  collect(document, calibration.steps);
  if (calibration.steps.empty())
    throw InputError(name + ": no measured step; allowed: JSON with length and tokens_per_second > 0 side by side");
  return calibration;
}

Calibration read_calibration(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string text(static_cast<std::size_t>(kMaxBytes), '\0');
  if (stream) stream.read(text.data(), kMaxBytes);
  if (stream.bad() || (stream.fail() && stream.gcount() == 0))
    throw InputError(file.string() + ": cannot be read; allowed: a JSON file of measurements");
  text.resize(static_cast<std::size_t>(stream.gcount()));
  return parse_calibration(text, file.string());
}

}  // namespace oomb::plan
