// The folder of a run: made, checked, and kept to one coordinator at a time.
//
//   config.json        the resolved settings
//   metrics.jsonl      one line a step
//   worker.log         what workers print, beyond the messages that are shown
//   checkpoints/       by the workers
//   .lock              held while a coordinator runs
#pragma once

#include <chrono>
#include <filesystem>
#include <string>

namespace oomb::status {

class RunFolder {
 public:
  /// Makes the folder when missing and locks it. InputError when that fails, something cannot be written in it, or
  /// another coordinator still holds it after `patience`.
  explicit RunFolder(const std::filesystem::path& path, std::chrono::milliseconds patience = {});
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

/// Replaces a file's content so that a reader, or a crash, sees the old or the new one, whole. ResourceError naming the
/// file when that fails; the old content is then still there.
void write_atomically(const std::filesystem::path& file, const std::string& content);

}  // namespace oomb::status
