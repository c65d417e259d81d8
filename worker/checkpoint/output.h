// Files being written. Writers take these interfaces, so that a test can make any write fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace oomb::checkpoint {

/// One file, written from front to back. Not for use by several threads at once.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void append(std::span<const std::byte> bytes) = 0;
  /// Makes the content durable (fsync) and closes. A file that is destroyed without it is not complete.
  virtual void close() = 0;
};

/// A folder that files are created in.
class OutputFolder {
 public:
  virtual ~OutputFolder() = default;
  /// `name` is a plain file name: letters, digits, '.', '_', '-', not starting with '.'; it must not exist yet.
  virtual std::unique_ptr<OutputFile> create(const std::string& name) = 0;
};

/// Writes to the existing folder `path`. Every failure (full disk, quota, I/O error) is an InputError with path and
/// cause.
std::unique_ptr<OutputFolder> open_disk_folder(const std::string& path);

/// Creates `name` with `text` in `folder` and closes it.
void write_text(OutputFolder& folder, const std::string& name, std::string_view text);

/// Whether `name` may be given to OutputFolder::create.
bool is_plain_name(std::string_view name);

}  // namespace oomb::checkpoint
