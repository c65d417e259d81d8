#include "coordinator/status/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "configs/error.h"
#include "coordinator/control/run_error.h"

namespace oomb::status {
namespace {

std::string error_text(int code) { return std::generic_category().message(code); }

// 0, or the error code.
int write_and_sync(int fd, const std::string& content) {
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t wrote = write(fd, content.data() + done, content.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return errno;
    done += static_cast<std::size_t>(wrote);
  }
  return fsync(fd) == 0 ? 0 : errno;
}

}  // namespace

RunFolder::RunFolder(const std::filesystem::path& path, std::chrono::milliseconds patience) : path_(path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path, error)) {
    throw InputError("run.dir: " + path.string() + ": cannot be made: " +
                     (error ? error.message() : std::string("something that is no folder is there")));
  }
  const std::filesystem::path lock = path / ".lock";
  lock_ = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) throw InputError("run.dir: " + path.string() + ": cannot be written: " + error_text(errno));
  // `oomb status` tries the lock for an instant.
  const auto deadline = std::chrono::steady_clock::now() + std::max(patience, std::chrono::milliseconds(300));
  while (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    if (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    close(lock_);
    throw InputError("run.dir: " + path.string() + ": in use by another run; allowed: a folder of its own for each");
  }
}

RunFolder::~RunFolder() { close(lock_); }

void write_atomically(const std::filesystem::path& file, const std::string& content) {
  const std::filesystem::path temporary = file.string() + ".tmp";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  int code = fd < 0 ? errno : write_and_sync(fd, content);
  if (fd >= 0) close(fd);
  if (code == 0 && rename(temporary.c_str(), file.c_str()) != 0) code = errno;
  if (code != 0) {
    unlink(temporary.c_str());
    throw control::ResourceError(file.string() + ": cannot be written: " + error_text(code));
  }
  const int folder = open(file.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
}

}  // namespace oomb::status
