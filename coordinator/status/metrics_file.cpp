#include "coordinator/status/metrics_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "coordinator/control/run_error.h"
#include "coordinator/status/run_folder.h"

namespace oomb::status {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int code) {
  throw control::ResourceError(path.string() + ": cannot be " + what + ": " + std::generic_category().message(code));
}

bool keeps(const std::string& line, std::int64_t first_step) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return false;
  const auto step = json.find("step");
  return step != json.end() && step->is_number_integer() && step->get<std::int64_t>() < first_step;
}

void remove_later_steps(const std::filesystem::path& path, std::int64_t first_step) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) fail(path, "read", errno);
  std::string kept;
  std::size_t size = 0;
  for (std::string line; std::getline(stream, line);) {
    const bool whole = !stream.eof();  // the last line of a crashed run may lack its end
    size += line.size() + (whole ? 1 : 0);
    if (whole && keeps(line, first_step)) kept += line + "\n";
  }
  if (stream.bad()) fail(path, "read", EIO);
  stream.close();
  if (kept.size() != size) write_atomically(path, kept);
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& file, std::int64_t first_step) : path_(file) {
  if (std::filesystem::is_regular_file(file)) remove_later_steps(file, first_step);
  fd_ = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(path_, "written", errno);
}

MetricsFile::~MetricsFile() { close(fd_); }

void MetricsFile::append(const nlohmann::ordered_json& line) {
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  struct stat before {};
  const bool known = fstat(fd_, &before) == 0;
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote = write(fd_, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int code = errno;
      if (known && S_ISREG(before.st_mode)) [[maybe_unused]]
        const int ignored = ftruncate(fd_, before.st_size);
      fail(path_, "written", code);
    }
    done += static_cast<std::size_t>(wrote);
  }
}

}  // namespace oomb::status
