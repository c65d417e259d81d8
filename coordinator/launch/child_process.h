// One child process with its output captured, and the means to end it with all its descendants.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/launch/launcher.h"

namespace oomb::launch {

class ChildProcess {
 public:
  /// Starts `program` with `arguments` (the first is its name) in its own process group, stdin empty, stdout and stderr
  /// captured. It gets SIGTERM when the calling thread ends in any way. InputError when it cannot be started.
  ChildProcess(const std::filesystem::path& program, const std::vector<std::string>& arguments,
               const std::vector<std::string>& environment, const std::filesystem::path& output_file);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  std::optional<LaunchExit> exited();
  void stop(std::chrono::milliseconds grace);
  std::vector<std::string> last_output();

 private:
  void read_output(int fd, int file);
  void take_output(const char* bytes, std::size_t count, int file);
  bool wait_exit(std::chrono::steady_clock::time_point deadline);
  void kill_orphans();

  pid_t pid_ = -1;
  std::optional<LaunchExit> exit_;
  std::thread reader_;
  std::atomic<bool> stop_reading_{false};
  std::mutex mutex_;
  std::deque<std::string> lines_;  // the last ones; the newest may be unfinished
};

/// From now on, processes whose parents die become children of this one, so that none can hide.
void adopt_orphans();

}  // namespace oomb::launch
