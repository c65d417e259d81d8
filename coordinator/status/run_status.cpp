#include "coordinator/status/run_status.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <vector>

#include "configs/error.h"
#include "coordinator/status/reporter.h"

namespace oomb::status {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::streamoff kTailBytes = 1 << 18;  // hundreds of lines

// The lock is tried for an instant, which a coordinator that starts just then waits out (RunFolder).
bool is_locked(const fs::path& folder) {
  const int fd = open((folder / ".lock").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool locked = flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  close(fd);
  return locked;
}

// The settings of the run's last start, if it had one.
RunConfig started_config(const RunConfig& config) {
  std::ifstream stream(config.run.dir / "config.json", std::ios::binary);
  if (!stream) return config;
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  try {
    return run_config_from_json(text);
  } catch (const InputError&) {
    return config;  // of another version
  }
}

// The last whole lines of metrics.jsonl, oldest first. The newest may still be in the making.
std::vector<json> last_metrics(const fs::path& file) {
  std::vector<json> lines;
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  if (!stream) {
    if (std::error_code error; fs::exists(file, error)) throw InputError(file.string() + ": cannot be read");
    return lines;
  }
  const std::streamoff size = stream.tellg();
  stream.seekg(std::max<std::streamoff>(0, size - kTailBytes));
  for (std::string line; std::getline(stream, line);) {
    json parsed = json::parse(line, nullptr, false);
    if (parsed.is_object() && parsed.contains("step") && parsed["step"].is_number_integer())
      lines.push_back(std::move(parsed));
  }
  return lines;
}

std::optional<double> number(const json& line, const char* key) {
  const auto entry = line.find(key);
  if (entry == line.end() || !entry->is_number()) return std::nullopt;
  return entry->get<double>();
}

void read_metrics(const fs::path& file, RunStatus& status) {
  const std::vector<json> lines = last_metrics(file);
  if (lines.empty()) return;
  status.step = lines.back()["step"];
  status.loss = number(lines.back(), "loss");
  for (const json& line : lines) {
    if (const auto loss = number(line, "eval_loss")) status.eval_loss = loss;
  }
  const auto recent = static_cast<std::ptrdiff_t>(std::min<std::size_t>(lines.size(), kRecentSteps));
  double tokens = 0, seconds = 0;
  for (auto line = lines.end() - recent; line != lines.end(); ++line) {
    tokens += number(*line, "tokens").value_or(0);
    seconds += number(*line, "seconds").value_or(0);
  }
  if (seconds > 0) status.tokens_per_second = tokens / seconds;
  const auto left = static_cast<double>(std::max<std::int64_t>(0, status.last_step - status.step));
  status.seconds_left = left * seconds / static_cast<double>(recent);
}

// A checkpoint of step 10 is the folder step-00000010, whole once its marker DONE is there (worker/checkpoint/store.h).
void find_checkpoint(const fs::path& folder, RunStatus& status) {
  static constexpr std::string_view kPrefix = "step-";
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    std::int64_t step = 0;
    const auto [end, bad] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (bad != std::errc() || end != name.data() + name.size() || step <= status.checkpoint_step) continue;
    std::error_code ignored;
    if (!fs::exists(entry.path() / "DONE", ignored)) continue;
    status.checkpoint_step = step;
    status.checkpoint = entry.path().string();
  }
}

}  // namespace

RunStatus read_run_status(const RunConfig& config) {
  const RunConfig started = started_config(config);
  RunStatus status;
  status.name = started.run.name;
  status.running = is_locked(config.run.dir);
  status.last_step = started.train.steps;
  if (started.train.stop_after > 0) status.last_step = std::min(status.last_step, started.train.stop_after);
  read_metrics(config.run.dir / "metrics.jsonl", status);
  find_checkpoint(started.checkpoint.dir, status);
  return status;
}

std::string status_text(const RunStatus& status) {
  std::ostringstream text;
  text << status.name << ": " << (status.running ? "running" : "not running") << ", step " << status.step << "/"
       << status.last_step;
  if (status.loss) text << ", loss " << *status.loss;
  if (status.eval_loss) text << ", held-out loss " << *status.eval_loss;
  if (status.tokens_per_second > 0) text << ", " << format_count(status.tokens_per_second) << " tok/s";
  if (status.running && status.seconds_left > 0) text << ", left " << format_duration(status.seconds_left);
  text << "; last checkpoint: " << (status.checkpoint.empty() ? "none" : status.checkpoint);
  return text.str();
}

std::string status_json(const RunStatus& status) {
  const auto maybe = [](const std::optional<double>& value) { return value ? json(*value) : json(); };
  nlohmann::ordered_json line;
  line["name"] = status.name;
  line["running"] = status.running;
  line["step"] = status.step;
  line["last_step"] = status.last_step;
  line["loss"] = maybe(status.loss);
  line["eval_loss"] = maybe(status.eval_loss);
  line["tokens_per_second"] = status.tokens_per_second;
  line["seconds_left"] = status.seconds_left;
  line["checkpoint"] = status.checkpoint.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(status.checkpoint);
  line["checkpoint_step"] =
      status.checkpoint.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(status.checkpoint_step);
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace oomb::status
