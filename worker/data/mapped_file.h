// A whole file, read-only in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace oomb::data {

/// Read-only private mapping of a regular file; an empty file maps to an empty span. Movable, not copyable; the span
/// lives as long as the object. const members may be used from any thread.
/// The file must not be truncated while it is mapped: the kernel would end the process with SIGBUS on the next read.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws InputError naming `path` and the cause (missing, no permission, a folder, a device).
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  void reset() noexcept;

  std::string path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace oomb::data
