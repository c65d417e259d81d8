// Measured speed of this system, to correct a plan's assumptions with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace oomb::plan {

/// Steps of one worker at one sequence length.
struct MeasuredStep {
  std::int64_t length = 0;  // tokens of a sequence
  double tokens_per_second = 0;
};

struct Calibration {
  std::string file;
  std::vector<MeasuredStep> steps;  // not empty
  /// The one measured nearest to `length`, in proportion.
  const MeasuredStep& nearest(std::int64_t length) const;
};

/// Reads what `oomb bench RUN.yaml step --json` writes, or any JSON in which objects, however nested, have
/// `tokens_per_second` (a number, or an object with `median`) and beside it `length`, `sequence_length` or `tokens`.
/// InputError naming the file when it cannot be read or has no such object.
Calibration read_calibration(const std::filesystem::path& file);
Calibration parse_calibration(const std::string& text, const std::string& name);

}  // namespace oomb::plan
