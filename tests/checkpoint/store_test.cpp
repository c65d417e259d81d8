#include "worker/checkpoint/store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "tests/data/test_files.h"
#include "worker/checkpoint/crc32c.h"

namespace oomb::checkpoint {
namespace {

using test::bytes_of;
using test::error_of;
using test::expect_mentions;
using test::read_all;
using test::TempFolder;

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"model.safetensors", "optimizer-00000.bin", "trainer.json"};

/// What file `number` of the checkpoint of `step` holds.
std::string content(int64_t step, size_t number, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(static_cast<size_t>(step) * 131 + number * 17 + i / 3);
  return text;
}

void fill(CheckpointWriter& writer, int64_t step, size_t bytes = 1000) {
  for (size_t f = 0; f < std::size(kFiles); ++f) {
    const auto file = writer.create(kFiles[f]);
    const std::string text = content(step, f, bytes + f);
    // Several pieces, so that a kill can fall between them.
    for (size_t at = 0; at < text.size(); at += 4096) file->append(bytes_of(std::string_view(text).substr(at, 4096)));
    file->close();
  }
}

CheckpointInfo save(CheckpointStore& store, int64_t step, size_t bytes = 1000) {
  const auto writer = store.begin(step, 0);
  fill(*writer, step, bytes);
  return writer->commit();
}

struct Fixture {
  explicit Fixture(int64_t keep = 2) {
    options.dir = dir / "checkpoints";
    options.keep = keep;
    options.warn = [this](const std::string& message) { warnings.push_back(message); };
  }
  CheckpointStore store() const { return CheckpointStore(options); }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(options.dir)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  TempFolder dir;
  std::vector<std::string> warnings;
  StoreOptions options;
};

TEST(Manifest, RoundTripAndEveryByteMatters) {
  const Manifest manifest{42, {{"a.bin", 0, 0}, {"b-1_x.json", int64_t{1} << 40, 0xDEADBEEF}}};
  const std::string text = manifest_text(manifest);
  EXPECT_EQ(parse_manifest(text, "DONE"), manifest);
  EXPECT_EQ(parse_manifest(manifest_text({0, {}}), "DONE"), (Manifest{0, {}}));
  for (size_t i = 0; i < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    expect_mentions(error_of([&] { parse_manifest(flipped, "x/DONE"); }), {"x/DONE"});
    error_of([&] { parse_manifest(text.substr(0, i), "x/DONE"); });
  }
  error_of([&] { parse_manifest(text + "\n", "x/DONE"); });
  // Right checksums do not make a wrong record right.
  for (const char* record : {"file 00000000 1 ../x", "file 00000000 -1 x", "file 00000000 1 DONE", "file 0 1 x",
                             "file 00000000 99999999999999999999 x", "file 00000000 1 ", "fil"}) {
    std::string body = std::string("oomb-checkpoint 1\nstep 3\n") + record + '\n';
    char end[16];
    std::snprintf(end, sizeof end, "end %08x\n", crc32c(bytes_of(body)));
    error_of([&] { parse_manifest(body + end, "x/DONE"); });
  }
}

TEST(Store, SavesWholeAndKeepsTheNewest) {
  Fixture f;
  CheckpointStore store = f.store();
  EXPECT_FALSE(store.latest_whole().has_value());
  for (const int64_t step : {10, 20, 30, 40}) {
    const CheckpointInfo info = save(store, step);
    EXPECT_EQ(info.step, step);
    EXPECT_EQ(store.latest_whole()->step, step);
  }
  EXPECT_EQ(f.entries(), (std::vector<std::string>{"step-00000030", "step-00000040"}));
  const auto info = store.latest_whole();
  ASSERT_EQ(info->manifest.files.size(), 3u);
  EXPECT_EQ(read_all(info->path + "/trainer.json"), content(40, 2, 1002));
  EXPECT_EQ(f.warnings, std::vector<std::string>{});
}

TEST(Store, SameStepReplacesAndALowerStepStays) {
  Fixture f;
  CheckpointStore store = f.store();
  save(store, 10);
  save(store, 20);
  save(store, 20, 2000);
  EXPECT_EQ(fs::file_size(store.step_path(20) + "/model.safetensors"), 2000u);
  EXPECT_EQ(f.entries(), (std::vector<std::string>{"step-00000010", "step-00000020"}));
  save(store, 30);
  // Going on from an older checkpoint: what was just written must not be pruned away.
  save(store, 5);
  EXPECT_NO_THROW(open_checkpoint(store.step_path(5)));
  EXPECT_EQ(store.latest_whole()->step, 30);
}

TEST(Store, AbandonedWriterLeavesNothing) {
  Fixture f;
  CheckpointStore store = f.store();
  save(store, 1);
  {
    const auto writer = store.begin(2, 0);
    fill(*writer, 2);
  }
  EXPECT_EQ(f.entries(), std::vector<std::string>{"step-00000001"});
  const auto writer = store.begin(3, 0);
  const auto open = writer->create("x");
  EXPECT_THROW(writer->create(kMarkerName), std::logic_error);
  EXPECT_THROW(writer->create("a/b"), std::logic_error);
  EXPECT_THROW(writer->commit(), std::logic_error);
}

TEST(Store, AdoptsFilesOfOtherProcesses) {
  Fixture f;
  CheckpointStore store = f.store();
  auto writer = store.begin(7, 0);
  write_text(*open_disk_folder(writer->path()), "optimizer-00001.bin", "shard");
  writer->adopt({"optimizer-00001.bin", 5, crc32c(bytes_of("shard"))});
  EXPECT_EQ(writer->commit().manifest.files.size(), 1u);
  EXPECT_EQ(store.latest_whole()->step, 7);
  writer = store.begin(8, 0);
  writer->adopt({"never-written.bin", 5, 0});
  expect_mentions(error_of([&] { writer->commit(); }), {"never-written.bin"});
  EXPECT_EQ(f.entries(), std::vector<std::string>{"step-00000007"});
}

TEST(Store, DamagedCheckpointFallsBackWithAWarning) {
  const auto damage = [](const std::string& what, const std::function<void(const std::string& folder)>& apply,
                         std::initializer_list<std::string> parts) {
    SCOPED_TRACE(what);
    Fixture f;
    CheckpointStore store = f.store();
    save(store, 10);
    save(store, 20);
    apply(store.step_path(20));
    const auto latest = store.latest_whole();
    ASSERT_TRUE(latest.has_value());
    EXPECT_EQ(latest->step, 10);
    ASSERT_EQ(f.warnings.size(), 1u);
    expect_mentions(f.warnings[0], {"step 20"});
    expect_mentions(f.warnings[0], parts);
    const std::string direct = error_of([&] { resolve_resume(store.step_path(20), nullptr); });
    expect_mentions(direct, parts);
    EXPECT_EQ(resolve_resume(f.options.dir, nullptr).step, 10);
  };
  const auto flip = [](const std::string& path, int64_t at) {
    std::string text = read_all(path);
    text[static_cast<size_t>(at)] = static_cast<char>(text[static_cast<size_t>(at)] ^ 0x10);
    std::ofstream(path, std::ios::binary) << text;
  };
  damage("first byte", [&](const std::string& p) { flip(p + "/model.safetensors", 0); },
         {"model.safetensors", "checksum"});
  damage("last byte", [&](const std::string& p) { flip(p + "/trainer.json", 1001); }, {"trainer.json", "checksum"});
  damage("cut", [](const std::string& p) { fs::resize_file(p + "/trainer.json", 1001); },
         {"trainer.json", "1001", "1002"});
  damage("longer", [](const std::string& p) { fs::resize_file(p + "/trainer.json", 1003); }, {"1003", "1002"});
  damage("file gone", [](const std::string& p) { fs::remove(p + "/trainer.json"); }, {"trainer.json", "No such file"});
  damage("marker gone", [](const std::string& p) { fs::remove(p + "/DONE"); }, {"DONE"});
  damage("marker flipped", [&](const std::string& p) { flip(p + "/DONE", 30); }, {"DONE"});
  damage("marker empty", [](const std::string& p) { fs::resize_file(p + "/DONE", 0); }, {"DONE"});
}

TEST(Store, RenamedFolderIsNotAnotherStep) {
  Fixture f;
  CheckpointStore store = f.store();
  save(store, 10);
  fs::copy(store.step_path(10), store.step_path(11));
  EXPECT_EQ(store.latest_whole()->step, 10);
  EXPECT_EQ(f.warnings.size(), 1u);
}

TEST(Store, PruningNeverCountsDamagedOnes) {
  Fixture f(1);
  CheckpointStore store = f.store();
  save(store, 10);
  fs::create_directory(store.step_path(99));  // newer, not whole
  EXPECT_EQ(store.prune(), 0);
  EXPECT_EQ(store.latest_whole()->step, 10);
  save(store, 20);
  EXPECT_EQ(store.steps(), (std::vector<int64_t>{20, 99}));
}

TEST(Store, ResumePaths) {
  Fixture f;
  CheckpointStore store = f.store();
  save(store, 10);
  save(store, 20);
  EXPECT_EQ(resolve_resume(f.options.dir, nullptr).step, 20);
  EXPECT_EQ(resolve_resume(f.options.dir + "/", nullptr).step, 20);
  EXPECT_EQ(resolve_resume(store.step_path(10), nullptr).step, 10);
  fs::rename(store.step_path(10), f.dir / "best");
  EXPECT_EQ(resolve_resume(f.dir / "best", nullptr).step, 10);
  expect_mentions(error_of([&] { resolve_resume(f.dir / "none", nullptr); }), {"none"});
  expect_mentions(error_of([&] { resolve_resume(f.dir.path(), nullptr); }), {f.dir.path(), "no whole checkpoint"});
  fs::create_directories(store.step_path(5));
  expect_mentions(error_of([&] { resolve_resume(store.step_path(5), nullptr); }), {"step-00000005", "DONE"});
}

TEST(Store, LeftoversAreIgnoredAndRemoved) {
  Fixture f;
  CheckpointStore store = f.store();
  save(store, 10);
  fs::copy(store.step_path(10), store.step_path(20) + ".tmp-123");  // even a complete one is not published
  fs::create_directories(f.options.dir + "/step-00000030.tmp-9-pruned/sub");
  f.dir.write("checkpoints/notes.tmp-1", "the user's own");
  EXPECT_EQ(store.latest_whole()->step, 10);
  EXPECT_EQ(store.remove_leftovers(), 2);
  EXPECT_EQ(f.entries(), (std::vector<std::string>{"notes.tmp-1", "step-00000010"}));
}

TEST(Store, ChecksTheFolderFirst) {
  Fixture f;
  CheckpointStore store = f.store();
  const int64_t absurd = int64_t{1} << 60;
  expect_mentions(error_of([&] { store.begin(1, absurd); }), {f.options.dir, std::to_string(absurd), "free"});
  EXPECT_EQ(f.entries(), std::vector<std::string>{});
  f.options.dir = f.dir.write("a-file", "x") + "/checkpoints";
  expect_mentions(error_of([&] { f.store().check_writable(0); }), {"a-file"});
  if (::geteuid() != 0) {
    fs::create_directory(f.dir / "closed");
    fs::permissions(f.dir / "closed", fs::perms::owner_read | fs::perms::owner_exec);
    f.options.dir = f.dir / "closed";
    expect_mentions(error_of([&] { f.store().check_writable(0); }), {"closed", "Permission denied"});
  }
}

// --- writes that fail -----------------------------------------------------------------------------------------------

/// Passes writes through and fails at the given operation, counted over the whole folder.
class FailingFolder final : public OutputFolder {
 public:
  FailingFolder(std::unique_ptr<OutputFolder> inner, int64_t* left) : inner_(std::move(inner)), left_(left) {}

  std::unique_ptr<OutputFile> create(const std::string& name) override {
    tick();
    return std::make_unique<File>(this, inner_->create(name));
  }

 private:
  class File final : public OutputFile {
   public:
    File(FailingFolder* folder, std::unique_ptr<OutputFile> inner) : folder_(folder), inner_(std::move(inner)) {}
    void append(std::span<const std::byte> bytes) override {
      inner_->append(bytes.first(bytes.size() / 2));  // half of a write may have reached the disk
      folder_->tick();
      inner_->append(bytes.subspan(bytes.size() / 2));
    }
    void close() override {
      folder_->tick();
      inner_->close();
    }

   private:
    FailingFolder* folder_;
    std::unique_ptr<OutputFile> inner_;
  };

  void tick() {
    if ((*left_)-- == 0) throw InputError("injected: cannot be written: No space left on device");
  }

  std::unique_ptr<OutputFolder> inner_;
  int64_t* left_;
};

TEST(Store, AFailureAtAnyOperationLeavesTheOldOnesAlone) {
  bool succeeded = false;
  int64_t failures = 0;
  for (int64_t fail_at = 0; !succeeded && fail_at < 100; ++fail_at) {
    Fixture f;
    {
      CheckpointStore before = f.store();
      save(before, 10);
      save(before, 20);
    }
    int64_t left = fail_at;
    f.options.open_folder = [&](const std::string& path) {
      return std::make_unique<FailingFolder>(open_disk_folder(path), &left);
    };
    CheckpointStore store = f.store();
    try {
      save(store, 30, 10000);
      succeeded = true;
    } catch (const InputError& error) {
      expect_mentions(error.what(), {"No space left"});
      ++failures;
    }
    const auto names = f.entries();
    if (!succeeded) {
      EXPECT_EQ(names, (std::vector<std::string>{"step-00000010", "step-00000020"})) << "failed at " << fail_at;
      EXPECT_EQ(f.store().latest_whole()->step, 20);
    }
    EXPECT_EQ(f.warnings, std::vector<std::string>{});
  }
  EXPECT_TRUE(succeeded);
  // 3 files of 3 appends each and the marker with one: create + appends + close.
  EXPECT_EQ(failures, 3 * (1 + 3 + 1) + (1 + 1 + 1));
}

TEST(Store, FullDisk) {
  Fixture f;
  const std::string disk = f.dir / "disk";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "a small file system cannot be mounted here; AFailureAtAnyOperation covers the same path";
  }
  f.options.dir = disk + "/checkpoints";
  {
    CheckpointStore store = f.store();
    save(store, 10, 20000);
    // Not announced, so that the write itself fails.
    expect_mentions(error_of([&] { save(store, 20, 200000); }), {"step-00000020", "No space left on device"});
    EXPECT_EQ(f.entries(), std::vector<std::string>{"step-00000010"});
    EXPECT_EQ(store.latest_whole()->step, 10);
    expect_mentions(error_of([&] { store.begin(20, 600000); }), {"600000", "free"});
    save(store, 20, 20000);
    EXPECT_EQ(store.latest_whole()->step, 20);
  }
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

// --- kill -9 --------------------------------------------------------------------------------------------------------

/// Saves steps from `first` on until it is killed.
[[noreturn]] void save_forever(const StoreOptions& options, int64_t first) {
  try {
    CheckpointStore store(options);
    for (int64_t step = first;; ++step) save(store, step, 60000);
  } catch (...) {
    ::_exit(3);
  }
}

TEST(Store, KilledAtAnyMomentTheNewestIsWhole) {
  constexpr uint64_t kSeed = 1776;
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  Fixture f;
  // Saves are as fast as this disk syncs: the moments of death are drawn from what three saves take.
  CheckpointStore before = f.store();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= 3; ++step) save(before, step, 60000);
  const auto three_saves =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
  const int64_t first = 3;
  int64_t last = first;
  int64_t leftovers = 0;
  for (int kill = 0; kill < 20; ++kill) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) save_forever(f.options, last + 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<uint64_t>(three_saves)));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with status " << status;

    CheckpointStore store = f.store();
    const auto latest = store.latest_whole();
    ASSERT_EQ(f.warnings, std::vector<std::string>{}) << "kill " << kill;
    ASSERT_TRUE(latest.has_value());
    ASSERT_GE(latest->step, last);
    last = latest->step;
    for (size_t n = 0; n < std::size(kFiles); ++n) {
      ASSERT_EQ(read_all(latest->path + '/' + kFiles[n]), content(last, n, 60000 + n));
    }
    // Everything with a final name is whole, not only the newest.
    for (const int64_t step : store.steps()) ASSERT_NO_THROW(open_checkpoint(store.step_path(step)));
    leftovers += store.remove_leftovers();
    for (const std::string& name : f.entries()) ASSERT_EQ(name.find(".tmp-"), std::string::npos);
  }
  std::printf("three saves take %.1f ms; %lld saves by the killed, %lld leftovers removed\n", three_saves / 1e3,
              static_cast<long long>(last - first), static_cast<long long>(leftovers));
  EXPECT_GT(last, first) << "no child finished a save: the test has shown nothing";
  EXPECT_GT(leftovers, 0) << "no kill fell into a save: the test has shown nothing";
}

}  // namespace
}  // namespace oomb::checkpoint
