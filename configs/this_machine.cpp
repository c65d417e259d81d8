#include "configs/this_machine.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace oomb {

namespace {

// The number after `key` in a file of "key: value kB" lines, in bytes.
std::optional<int64_t> kilobytes_field(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key + ":", 0) != 0) continue;
    std::istringstream fields(line.substr(key.size() + 1));
    int64_t kilobytes = 0;
    if (fields >> kilobytes) return kilobytes * 1024;
  }
  return std::nullopt;
}

std::optional<int64_t> number_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string text;
  if (!(in >> text)) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;  // "max"
  return value;
}

// limit - use of one control group folder.
std::optional<int64_t> room_of(const std::filesystem::path& folder, const char* limit, const char* use) {
  const auto most = number_in(folder / limit), used = number_in(folder / use);
  if (!most || !used) return std::nullopt;
  return std::max<int64_t>(*most - *used, 0);
}

void take_smaller(int64_t& best, std::optional<int64_t> value) {
  if (value && (best < 0 || *value < best)) best = *value;
}

}  // namespace

int64_t available_host_bytes() {
  int64_t best = -1;
  take_smaller(best, kilobytes_field("/proc/meminfo", "MemAvailable"));
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" (v2) or "N:memory:/path" (v1)
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && controllers.find("memory") == std::string::npos) continue;
    const std::filesystem::path root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::filesystem::path folder = root / line.substr(second + 2);
    while (true) {
      take_smaller(best, v2 ? room_of(folder, "memory.max", "memory.current")
                            : room_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes"));
      if (folder == root || !folder.has_relative_path() || folder.string().size() <= root.string().size()) break;
      folder = folder.parent_path();
    }
  }
  return best;
}

int64_t peak_host_bytes() { return kilobytes_field("/proc/self/status", "VmHWM").value_or(0); }

bool reset_peak_host_bytes() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

int64_t available_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(CPU_COUNT(&cores), 1);
}

}  // namespace oomb
