// Checkpoints on disk: written whole or not at all.
//
// A checkpoint of step 10 is the folder <dir>/step-00000010. It is made as <dir>/step-00000010.tmp-<pid>:
//   1. every file is written and fsynced;
//   2. the marker DONE is written last and fsynced: step, name, size and CRC-32C of every file, and its own CRC;
//   3. the folder is fsynced, renamed to its final name in one atomic step, and <dir> is fsynced.
// A checkpoint is *whole* when its folder has the final name and everything DONE lists is there with that size and
// checksum. A process may die, or the machine lose power, at any moment: what is there is whole, or has a .tmp- name.
// A folder of the same step that is already there is exchanged for the new one and then removed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "worker/checkpoint/output.h"

namespace oomb::checkpoint {

inline constexpr const char* kMarkerName = "DONE";

struct FileRecord {
  std::string name;
  int64_t size = 0;
  uint32_t crc = 0;  ///< CRC-32C of the content

  bool operator==(const FileRecord&) const = default;
};

/// What the marker of a checkpoint says.
struct Manifest {
  int64_t step = 0;
  std::vector<FileRecord> files;

  bool operator==(const Manifest&) const = default;
};

std::string manifest_text(const Manifest& manifest);
/// Throws InputError that begins with `where` on anything but the text of a manifest.
Manifest parse_manifest(std::string_view text, const std::string& where);

/// A checkpoint that was whole when it was looked at.
struct CheckpointInfo {
  int64_t step = 0;
  std::string path;  ///< its folder
  Manifest manifest;
};

enum class Verify {
  kSizes,      ///< marker valid, all files there with the right size: cheap
  kChecksums,  ///< their content too: reads everything once
};

/// Throws InputError naming the file when the folder `path` is not a whole checkpoint.
CheckpointInfo open_checkpoint(const std::string& path, Verify verify = Verify::kChecksums);

using Warn = std::function<void(const std::string& message)>;

/// For `resume: PATH`: PATH is the folder of one checkpoint, which must be whole, or a folder of checkpoints, whose
/// newest whole one is taken (damaged newer ones are reported through `warn`). InputError when there is none.
CheckpointInfo resolve_resume(const std::string& path, const Warn& warn);

/// A checkpoint in the making. Destroyed without commit(), it leaves nothing behind. Neither it nor the files it
/// creates may outlive what made them.
class CheckpointWriter : public OutputFolder {
 public:
  /// The temporary folder, for other processes that write their own files into it.
  virtual const std::string& path() const = 0;
  /// Adds a file that another process has written (and fsynced) into path().
  virtual void adopt(const FileRecord& file) = 0;
  /// Steps 2 and 3 above, then removes what is older than the `keep` newest. Every file must have been closed
  /// (std::logic_error). On InputError the checkpoints that were there before are untouched and the temporary folder is
  /// gone. Call it once.
  virtual CheckpointInfo commit() = 0;
};

struct StoreOptions {
  std::string dir;
  /// Whole checkpoints to keep, ≥ 1; 0 keeps all.
  int64_t keep = 2;
  /// Gets one line for each thing that was passed over: damaged checkpoints, folders that cannot be removed.
  Warn warn;
  /// How folders are written; tests make it fail. Empty: open_disk_folder.
  std::function<std::unique_ptr<OutputFolder>(const std::string& path)> open_folder;
};

/// The checkpoints of one run. One process may write into `dir`, any number may read. Not for several threads at once.
class CheckpointStore {
 public:
  /// Touches nothing yet.
  explicit CheckpointStore(StoreOptions options);

  /// Makes `dir` where it is missing and throws InputError when it cannot be written, or when the file system has less
  /// than `bytes` free (the message gives both numbers).
  void check_writable(int64_t bytes) const;

  /// Starts the checkpoint of `step` ≥ 0 after check_writable(expected_bytes).
  std::unique_ptr<CheckpointWriter> begin(int64_t step, int64_t expected_bytes);

  /// The newest whole checkpoint; damaged newer ones are reported through `warn` and passed over.
  std::optional<CheckpointInfo> latest_whole(Verify verify = Verify::kChecksums) const;

  /// Steps of all folders with a final name, whole or not, rising.
  std::vector<int64_t> steps() const;
  std::string step_path(int64_t step) const;

  /// Removes temporary folders of earlier processes. Only for the process that writes into `dir`. Returns their number.
  int64_t remove_leftovers();

  /// Removes whole checkpoints beyond the `keep` newest, oldest first; never the newest whole one nor the one committed
  /// last by this object. Damaged ones are neither counted nor removed. Returns the number removed.
  int64_t prune();

 private:
  friend class StoreWriter;
  void warn(const std::string& message) const;
  CheckpointInfo publish(const std::string& temporary, const Manifest& manifest);

  StoreOptions options_;
  int64_t last_committed_ = -1;
};

}  // namespace oomb::checkpoint
