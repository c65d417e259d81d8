// metrics.jsonl: one JSON object a step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>

namespace oomb::status {

class MetricsFile {
 public:
  /// Opens `file` for the steps from `first_step` on. Lines of that step and later ones, left by a run that went
  /// further than its last checkpoint, and lines that are not whole are removed first, atomically. ResourceError when
  /// the file cannot be read or written.
  MetricsFile(const std::filesystem::path& file, std::int64_t first_step);
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;
  ~MetricsFile();

  /// Appends one line, handed to the system before this returns. ResourceError when that fails; what was written of the
  /// line is taken back.
  void append(const nlohmann::ordered_json& line);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace oomb::status
