#include "worker/checkpoint/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "configs/error.h"

namespace oomb::checkpoint {
namespace {

[[noreturn]] void fail(const std::string& path, int error) {
  throw InputError(path + ": cannot be written: " + std::generic_category().message(error));
}

class DiskFile final : public OutputFile {
 public:
  explicit DiskFile(std::string path) : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0) fail(path_, errno);
  }
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  ~DiskFile() override {
    if (fd_ >= 0) ::close(fd_);
  }

  void append(std::span<const std::byte> bytes) override {
    if (fd_ < 0) throw std::logic_error(path_ + ": append after close");
    // Pieces keep one call below the kernel's 2 GiB limit.
    constexpr size_t kPiece = size_t{1} << 30;
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kPiece));
      if (written < 0) {
        if (errno == EINTR) continue;
        fail(path_, errno);
      }
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
  }

  void close() override {
    if (fd_ < 0) throw std::logic_error(path_ + ": closed twice");
    if (::fsync(fd_) != 0) fail(path_, errno);
    // The descriptor is gone whatever close() says; network file systems report a late full disk here.
    if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail(path_, errno);
  }

 private:
  std::string path_;
  int fd_ = -1;
};

class DiskFolder final : public OutputFolder {
 public:
  explicit DiskFolder(std::string path) : path_(std::move(path)) {}

  std::unique_ptr<OutputFile> create(const std::string& name) override {
    if (!is_plain_name(name)) throw std::logic_error("'" + name + "' is not a plain file name");
    return std::make_unique<DiskFile>(path_ + '/' + name);
  }

 private:
  std::string path_;
};

}  // namespace

std::unique_ptr<OutputFolder> open_disk_folder(const std::string& path) { return std::make_unique<DiskFolder>(path); }

void write_text(OutputFolder& folder, const std::string& name, std::string_view text) {
  const auto file = folder.create(name);
  file->append(std::as_bytes(std::span(text.data(), text.size())));
  file->close();
}

bool is_plain_name(std::string_view name) {
  if (name.empty() || name.size() > 200 || name.front() == '.') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

}  // namespace oomb::checkpoint
