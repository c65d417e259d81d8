// What the user sees of a run: one line that is rewritten on a terminal, plain lines in a log.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "configs/run_config.h"

namespace oomb::status {

struct StepStatus {
  std::int64_t step = 0;
  std::int64_t last_step = 0;  // where this run ends
  double loss = 0;             // NaN when it is no number
  double tokens_per_second = 0;
  double seconds_left = 0;  // to last_step, from the steps so far
  std::int64_t hbm_peak_bytes = 0;
  std::int64_t host_peak_bytes = 0;
};

/// Used by one thread. Lines go to `out` (steps, infos) and to stderr (warnings, errors).
class Reporter {
 public:
  Reporter(std::FILE* out, LogLevel level, std::int64_t step_every);
  ~Reporter();

  void log(LogLevel level, const std::string& text);
  void info(const std::string& text) { log(LogLevel::kInfo, text); }
  void warning(const std::string& text) { log(LogLevel::kWarning, text); }
  void error(const std::string& text) { log(LogLevel::kError, text); }
  void step(const StepStatus& status);

 private:
  void clear_line();
  std::FILE* out_;
  LogLevel level_;
  std::int64_t step_every_;
  bool terminal_;
  std::string line_;  // on the terminal now
};

std::string format_count(double value);        // 12.3K, 4.56M
std::string format_bytes(std::int64_t bytes);  // 1.50 GiB
std::string format_duration(double seconds);   // 1h02m, 3m05s, 12s

}  // namespace oomb::status
