#include "coordinator/status/reporter.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace oomb::status {
namespace {

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char buffer[256];
  std::snprintf(buffer, sizeof(buffer), pattern, args...);
  return buffer;
}

std::string scaled(double value, double base, const char* const* units, int count, const char* separator) {
  int unit = 0;
  while (std::abs(value) >= base && unit + 1 < count) {
    value /= base;
    ++unit;
  }
  const int digits = unit == 0 ? 0 : (std::abs(value) < 10 ? 2 : (std::abs(value) < 100 ? 1 : 0));
  return format("%.*f%s%s", digits, value, separator, units[unit]);
}

std::size_t terminal_columns(std::FILE* out) {
  winsize size{};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

// A message is shown as one line, whatever is in it.
std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return text;
}

}  // namespace

std::string format_count(double value) {
  static constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  return scaled(value, 1000, kUnits, 5, "");
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  return scaled(static_cast<double>(bytes), 1024, kUnits, 5, " ");
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole >= 86400) return format("%lldd%02lldh", whole / 86400, whole / 3600 % 24);
  if (whole >= 3600) return format("%lldh%02lldm", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return format("%lldm%02llds", whole / 60, whole % 60);
  return format("%llds", whole);
}

Reporter::Reporter(std::FILE* out, LogLevel level, std::int64_t step_every)
    : out_(out), level_(level), step_every_(step_every), terminal_(isatty(fileno(out)) == 1) {}

Reporter::~Reporter() {
  if (line_.empty()) return;
  std::fputc('\n', out_);  // the last state stays on the screen
  std::fflush(out_);
}

void Reporter::clear_line() {
  if (line_.empty()) return;
  std::fputs("\r\033[K", out_);
  std::fflush(out_);
}

void Reporter::log(LogLevel level, const std::string& text) {
  if (level < level_) return;
  clear_line();
  std::FILE* stream = level >= LogLevel::kWarning ? stderr : out_;
  const char* prefix = level == LogLevel::kError ? "error: " : level == LogLevel::kWarning ? "warning: " : "";
  std::fprintf(stream, "%s%s\n", prefix, one_line(text).c_str());
  std::fflush(stream);
  if (!line_.empty()) {
    std::fputs(line_.c_str(), out_);
    std::fflush(out_);
  }
}

void Reporter::step(const StepStatus& status) {
  std::string line =
      format("step %lld/%lld  loss %.4f  %s tok/s  left %s", static_cast<long long>(status.step),
             static_cast<long long>(status.last_step), status.loss, format_count(status.tokens_per_second).c_str(),
             format_duration(status.seconds_left).c_str());
  if (status.hbm_peak_bytes > 0) line += "  hbm " + format_bytes(status.hbm_peak_bytes);
  line += "  host " + format_bytes(status.host_peak_bytes);
  if (terminal_) {
    clear_line();
    line_ = line.substr(0, terminal_columns(out_) - 1);
    std::fputs(line_.c_str(), out_);
  } else if (level_ > LogLevel::kInfo) {
    return;
  } else if (status.step % step_every_ == 0 || status.step == status.last_step) {
    std::fprintf(out_, "%s\n", line.c_str());
  }
  std::fflush(out_);
}

}  // namespace oomb::status
