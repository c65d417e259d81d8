#include "worker/checkpoint/store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "configs/error.h"
#include "worker/checkpoint/crc32c.h"

namespace oomb::checkpoint {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTempMark = ".tmp-";
constexpr std::string_view kManifestTitle = "oomb-checkpoint 1";
constexpr int64_t kMaxManifestBytes = int64_t{64} << 20;

std::string cause(int error) { return std::generic_category().message(error); }

/// A descriptor that closes itself.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (fd_ < 0) throw InputError(path + ": cannot be opened: " + cause(errno));
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { ::close(fd_); }
  int get() const { return fd_; }

 private:
  int fd_;
};

void sync_folder(const std::string& path) {
  const Descriptor folder(path, O_RDONLY | O_DIRECTORY);
  if (::fsync(folder.get()) != 0) throw InputError(path + ": cannot be written: " + cause(errno));
}

template <typename T>
bool parse_number(std::string_view text, T* value, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty() && text.front() != '-';
}

std::string hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

/// The step of a final folder name, or −1.
int64_t step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return -1;
  const std::string_view digits = name.substr(kStepPrefix.size());
  int64_t step = -1;
  if (digits.size() < 8 || (digits.size() > 8 && digits.front() == '0') || !parse_number(digits, &step)) return -1;
  return step;
}

bool is_temporary(std::string_view name) {
  const size_t mark = name.find(kTempMark);
  return mark != std::string_view::npos && step_of(name.substr(0, mark)) >= 0;
}

std::string step_name(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return name;
}

/// Names in `folder`; nothing when it does not exist.
std::vector<std::string> list(const std::string& folder) {
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(folder.c_str()), ::closedir);
  if (dir == nullptr) {
    if (errno == ENOENT) return {};
    throw InputError(folder + ": the folder cannot be read: " + cause(errno));
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir.get())) names.emplace_back(entry->d_name);
  return names;
}

/// Reads a file once, front to back, with plain reads: a bad sector is then an error message and no signal.
template <typename Consume>
void read_file(const std::string& path, const Consume& consume) {
  const Descriptor file(path, O_RDONLY);
  std::vector<std::byte> buffer(size_t{1} << 20);
  while (true) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got == 0) return;
    if (got < 0) {
      if (errno == EINTR) continue;
      throw InputError(path + ": cannot be read: " + cause(errno));
    }
    consume(std::span<const std::byte>(buffer).first(static_cast<size_t>(got)));
  }
}

int64_t file_size(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) throw InputError(path + ": cannot be read: " + cause(errno));
  if (!S_ISREG(info.st_mode)) throw InputError(path + ": not a regular file");
  return info.st_size;
}

void verify_file(const std::string& path, const FileRecord& record, Verify verify) {
  const int64_t size = file_size(path);
  if (size != record.size) {
    throw InputError(path + ": has " + std::to_string(size) + " bytes, its checkpoint's marker says " +
                     std::to_string(record.size));
  }
  if (verify == Verify::kSizes) return;
  uint32_t crc = 0;
  read_file(path, [&](std::span<const std::byte> bytes) { crc = crc32c(bytes, crc); });
  if (crc != record.crc) {
    throw InputError(path + ": damaged: checksum " + hex(crc) + ", its checkpoint's marker says " + hex(record.crc));
  }
}

bool remove_tree(const std::string& path, std::string* why) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) *why = error.message();
  return !error;
}

/// Takes the next line off `text`; false when no complete line is left.
bool next_line(std::string_view* text, std::string_view* line) {
  const size_t end = text->find('\n');
  if (end == std::string_view::npos) return false;
  *line = text->substr(0, end);
  text->remove_prefix(end + 1);
  return true;
}

bool parse_file_line(std::string_view line, FileRecord* record) {
  if (!line.starts_with("file ") || line.size() < 15 || line[13] != ' ') return false;
  if (!parse_number(line.substr(5, 8), &record->crc, 16)) return false;
  line.remove_prefix(14);
  const size_t space = line.find(' ');
  if (space == std::string_view::npos || !parse_number(line.substr(0, space), &record->size)) return false;
  record->name = line.substr(space + 1);
  return is_plain_name(record->name) && record->name != kMarkerName;
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  std::string text = std::string(kManifestTitle) + "\nstep " + std::to_string(manifest.step) + '\n';
  for (const FileRecord& file : manifest.files) {
    text += "file " + hex(file.crc) + ' ' + std::to_string(file.size) + ' ' + file.name + '\n';
  }
  return text + "end " + hex(crc32c(std::as_bytes(std::span(text)))) + '\n';
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const auto wrong = [&](const std::string& what) { return InputError(where + ": " + what); };
  const std::string_view whole = text;
  std::string_view line;
  if (!next_line(&text, &line) || line != kManifestTitle) {
    throw wrong("does not begin with \"" + std::string(kManifestTitle) + "\"");
  }
  Manifest manifest;
  std::set<std::string> names;
  if (!next_line(&text, &line) || !line.starts_with("step ") || !parse_number(line.substr(5), &manifest.step)) {
    throw wrong("its second line must be \"step N\"");
  }
  while (true) {
    const size_t before = whole.size() - text.size();
    if (!next_line(&text, &line)) throw wrong("truncated: no end line");
    if (line.starts_with("end ")) {
      uint32_t crc = 0;
      const auto body = whole.substr(0, before);
      if (line.size() != 12 || !parse_number(line.substr(4), &crc, 16) ||
          crc != crc32c(std::as_bytes(std::span(body.data(), body.size())))) {
        throw wrong("damaged: its own checksum does not match");
      }
      if (!text.empty()) throw wrong("has text after its end line");
      return manifest;
    }
    FileRecord record;
    if (!parse_file_line(line, &record)) throw wrong("has a line that is not a file record");
    if (!names.insert(record.name).second) throw wrong("lists " + record.name + " twice");
    manifest.files.push_back(std::move(record));
  }
}

CheckpointInfo open_checkpoint(const std::string& path, Verify verify) {
  const std::string marker = path + '/' + kMarkerName;
  struct stat info {};
  if (::stat(marker.c_str(), &info) != 0) {
    throw InputError(path + ": not a whole checkpoint: its " + kMarkerName + " marker cannot be read: " + cause(errno));
  }
  if (file_size(marker) > kMaxManifestBytes) throw InputError(marker + ": far too large for a marker");
  std::string text;
  read_file(marker, [&](std::span<const std::byte> bytes) {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  CheckpointInfo result;
  result.manifest = parse_manifest(text, marker);
  result.step = result.manifest.step;
  result.path = path;
  for (const FileRecord& file : result.manifest.files) verify_file(path + '/' + file.name, file, verify);
  return result;
}

CheckpointInfo resolve_resume(const std::string& path, const Warn& warn) {
  std::string folder = path;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0) throw InputError(folder + ": no checkpoint there: " + cause(errno));
  if (!S_ISDIR(info.st_mode)) throw InputError(folder + ": must be the folder of one checkpoint or of several");
  const std::string_view name = std::string_view(folder).substr(folder.rfind('/') + 1);
  const bool has_marker = ::stat((folder + '/' + kMarkerName).c_str(), &info) == 0;
  if (has_marker || step_of(name) >= 0 || is_temporary(name)) return open_checkpoint(folder);
  StoreOptions options;
  options.dir = folder;
  options.warn = warn;
  const auto latest = CheckpointStore(std::move(options)).latest_whole();
  if (!latest) throw InputError(folder + ": holds no whole checkpoint (step-…/" + kMarkerName + ")");
  return *latest;
}

namespace {

/// Collects size and checksum of a file on its way to disk.
class RecordedFile final : public OutputFile {
 public:
  RecordedFile(std::string name, std::unique_ptr<OutputFile> file, std::vector<FileRecord>* done, int64_t* open)
      : record_{std::move(name), 0, 0}, file_(std::move(file)), done_(done), open_(open) {}

  void append(std::span<const std::byte> bytes) override {
    file_->append(bytes);
    record_.crc = crc32c(bytes, record_.crc);
    record_.size += static_cast<int64_t>(bytes.size());
  }
  void close() override {
    file_->close();
    done_->push_back(record_);
    --*open_;
  }

 private:
  FileRecord record_;
  std::unique_ptr<OutputFile> file_;
  std::vector<FileRecord>* done_;
  int64_t* open_;
};

}  // namespace

class StoreWriter final : public CheckpointWriter {
 public:
  StoreWriter(CheckpointStore* store, int64_t step, std::string path) : store_(store), path_(std::move(path)) {
    manifest_.step = step;
    std::string why;
    remove_tree(path_, &why);
    if (::mkdir(path_.c_str(), 0777) != 0) throw InputError(path_ + ": cannot be made: " + cause(errno));
    const auto& open_folder = store_->options_.open_folder;
    folder_ = open_folder ? open_folder(path_) : open_disk_folder(path_);
  }
  StoreWriter(const StoreWriter&) = delete;
  StoreWriter& operator=(const StoreWriter&) = delete;
  ~StoreWriter() override { discard(); }

  const std::string& path() const override { return path_; }

  std::unique_ptr<OutputFile> create(const std::string& name) override {
    check_name(name);
    auto file = folder_->create(name);
    ++open_files_;
    return std::make_unique<RecordedFile>(name, std::move(file), &manifest_.files, &open_files_);
  }

  void adopt(const FileRecord& file) override {
    check_name(file.name);
    manifest_.files.push_back(file);
  }

  CheckpointInfo commit() override {
    if (open_files_ != 0) throw std::logic_error(path_ + ": commit with files that were not closed");
    if (committed_) throw std::logic_error(path_ + ": committed twice");
    committed_ = true;
    std::sort(manifest_.files.begin(), manifest_.files.end(),
              [](const FileRecord& a, const FileRecord& b) { return a.name < b.name; });
    try {
      for (const FileRecord& file : manifest_.files) verify_file(path_ + '/' + file.name, file, Verify::kSizes);
      write_text(*folder_, kMarkerName, manifest_text(manifest_));
      sync_folder(path_);
      return store_->publish(path_, manifest_);
    } catch (...) {
      discard();
      throw;
    }
  }

 private:
  void check_name(const std::string& name) const {
    bool taken = !is_plain_name(name) || name == kMarkerName;
    for (const FileRecord& file : manifest_.files) taken = taken || file.name == name;
    if (taken) throw std::logic_error("checkpoint file '" + name + "': not a plain name, or there already");
  }

  void discard() noexcept {
    std::string why;
    if (!remove_tree(path_, &why)) store_->warn(path_ + ": cannot be removed: " + why);
  }

  CheckpointStore* store_;
  std::string path_;
  std::unique_ptr<OutputFolder> folder_;
  Manifest manifest_;
  int64_t open_files_ = 0;
  bool committed_ = false;
};

CheckpointStore::CheckpointStore(StoreOptions options) : options_(std::move(options)) {
  if (options_.dir.empty()) throw InputError("checkpoint folder is empty");
  if (options_.keep < 0) throw InputError("checkpoints to keep must not be negative");
}

void CheckpointStore::warn(const std::string& message) const {
  if (options_.warn) options_.warn(message);
}

std::string CheckpointStore::step_path(int64_t step) const { return options_.dir + '/' + step_name(step); }

void CheckpointStore::check_writable(int64_t bytes) const {
  std::error_code error;
  std::filesystem::create_directories(options_.dir, error);
  if (error) throw InputError(options_.dir + ": the checkpoint folder cannot be made: " + error.message());
  if (::access(options_.dir.c_str(), W_OK | X_OK) != 0) {
    throw InputError(options_.dir + ": the checkpoint folder cannot be written: " + cause(errno));
  }
  struct statvfs info {};
  if (::statvfs(options_.dir.c_str(), &info) != 0) {
    throw InputError(options_.dir + ": free space cannot be read: " + cause(errno));
  }
  const auto free = static_cast<unsigned __int128>(info.f_bavail) * info.f_frsize;
  if (bytes > 0 && free < static_cast<unsigned __int128>(bytes)) {
    throw InputError(options_.dir + ": a checkpoint needs " + std::to_string(bytes) + " bytes, " +
                     std::to_string(static_cast<uint64_t>(free)) + " are free: make room or choose another folder");
  }
}

std::unique_ptr<CheckpointWriter> CheckpointStore::begin(int64_t step, int64_t expected_bytes) {
  if (step < 0) throw std::logic_error("CheckpointStore::begin: step " + std::to_string(step));
  check_writable(expected_bytes);
  return std::make_unique<StoreWriter>(this, step,
                                       step_path(step) + std::string(kTempMark) + std::to_string(::getpid()));
}

CheckpointInfo CheckpointStore::publish(const std::string& temporary, const Manifest& manifest) {
  const std::string target = step_path(manifest.step);
  const auto fail = [&] { throw InputError(target + ": cannot be put in place: " + cause(errno)); };
  struct stat info {};
  if (::lstat(target.c_str(), &info) != 0) {
    if (::rename(temporary.c_str(), target.c_str()) != 0) fail();
  } else if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    // Some network file systems cannot exchange. Then there is a moment without this step; older ones are not touched.
    const std::string aside = temporary + "-old";
    if (::rename(target.c_str(), aside.c_str()) != 0) fail();
    if (::rename(temporary.c_str(), target.c_str()) != 0) {
      const int error = errno;
      if (::rename(aside.c_str(), target.c_str()) != 0) warn(aside + ": cannot be moved back to " + target);
      errno = error;
      fail();
    }
    std::string why;
    if (!remove_tree(aside, &why)) warn(aside + ": cannot be removed: " + why);
  }
  sync_folder(options_.dir);
  // After an exchange the replaced checkpoint has the temporary name; its writer removes it.
  last_committed_ = manifest.step;
  try {
    prune();
  } catch (const InputError& error) {
    warn(error.what());  // the new checkpoint is in place all the same
  }
  return {manifest.step, target, manifest};
}

std::vector<int64_t> CheckpointStore::steps() const {
  std::vector<int64_t> result;
  for (const std::string& name : list(options_.dir)) {
    if (const int64_t step = step_of(name); step >= 0) result.push_back(step);
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::optional<CheckpointInfo> CheckpointStore::latest_whole(Verify verify) const {
  const auto all = steps();
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    try {
      CheckpointInfo info = open_checkpoint(step_path(*step), verify);
      if (info.step != *step) {
        throw InputError(info.path + ": its marker is that of step " + std::to_string(info.step));
      }
      return info;
    } catch (const InputError& error) {
      warn("checkpoint of step " + std::to_string(*step) + " is passed over: " + error.what());
    }
  }
  return std::nullopt;
}

int64_t CheckpointStore::remove_leftovers() {
  int64_t removed = 0;
  for (const std::string& name : list(options_.dir)) {
    if (!is_temporary(name)) continue;
    const std::string path = options_.dir + '/' + name;
    std::string why;
    if (remove_tree(path, &why)) {
      ++removed;
    } else {
      warn(path + ": cannot be removed: " + why);
    }
  }
  return removed;
}

int64_t CheckpointStore::prune() {
  if (options_.keep == 0) return 0;
  std::vector<int64_t> whole;
  for (const int64_t step : steps()) {
    try {
      if (open_checkpoint(step_path(step), Verify::kSizes).step == step) whole.push_back(step);
    } catch (const InputError&) {
      // latest_whole() reports it to those who would read it.
    }
  }
  int64_t removed = 0;
  for (size_t i = 0; i + static_cast<size_t>(options_.keep) < whole.size(); ++i) {
    if (whole[i] == last_committed_) continue;
    // Under a temporary name first: a removal that is cut short must not look like a damaged checkpoint.
    const std::string path = step_path(whole[i]);
    const std::string doomed = path + std::string(kTempMark) + std::to_string(::getpid()) + "-pruned";
    std::string why;
    if (::rename(path.c_str(), doomed.c_str()) != 0) {
      warn(path + ": cannot be removed: " + cause(errno));
    } else if (!remove_tree(doomed, &why)) {
      warn(doomed + ": cannot be removed: " + why);
    } else {
      ++removed;
    }
  }
  return removed;
}

}  // namespace oomb::checkpoint
