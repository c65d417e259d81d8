// Runs the real program `oomb` with the fake worker in a folder of its own, for tests.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace oomb::testing {

/// A new folder under the system's temporary one, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

/// The lines of a file of JSON objects; a line that is none fails the test.
std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path);

/// A started `oomb`. Whatever happens, its processes are gone when this object is.
class OombProcess {
 public:
  /// `behaviour` is FAKE_WORKER's text; further variables are added to the environment. With `terminal`, stdout is a
  /// pseudo-terminal.
  OombProcess(const std::filesystem::path& folder, const std::vector<std::string>& arguments,
              const std::string& behaviour, const std::map<std::string, std::string>& environment = {},
              bool terminal = false);
  ~OombProcess();

  /// Waits for the end; -1000 if it does not come in time. 128 + signal when killed by one.
  int wait(std::chrono::seconds limit = std::chrono::seconds(25));
  bool running();
  void signal(int number);

  pid_t pid() const { return pid_; }
  std::string out() const;
  std::string err() const;

  /// Waits until a condition holds (true) or the time is over.
  bool wait_until(const std::function<bool()>& condition, std::chrono::seconds limit = std::chrono::seconds(20));

  /// Living processes that were started by this program: those with its mark in their environment, itself excluded.
  std::vector<pid_t> family() const;

 private:
  std::filesystem::path folder_;
  std::string mark_;
  pid_t pid_ = -1;
  int status_ = -1;
  bool reaped_ = false;
  int terminal_ = -1;
  mutable std::string terminal_text_;
};

}  // namespace oomb::testing
