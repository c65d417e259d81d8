#include "coordinator/launch/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <system_error>

#include "configs/error.h"

namespace oomb::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kMaxLines = 20;
constexpr std::size_t kMaxLineBytes = 2000;

std::string error_text(int code) { return std::generic_category().message(code); }

// parent of each living process, from /proc/PID/stat: "PID (name) STATE PPID ..."; the name may hold anything.
std::map<pid_t, pid_t> process_parents() {
  std::map<pid_t, pid_t> parents;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stream(entry.path() / "stat");
    const std::string text(std::istreambuf_iterator<char>(stream), {});
    const std::size_t end = text.rfind(')');
    char state = 0;
    int parent = 0;
    if (end == std::string::npos || std::sscanf(text.c_str() + end + 1, " %c %d", &state, &parent) != 2) continue;
    if (state != 'Z' && state != 'X') parents[static_cast<pid_t>(std::stol(name))] = parent;
  }
  return parents;
}

std::vector<pid_t> descendants_of(pid_t ancestor) {
  const std::map<pid_t, pid_t> parents = process_parents();
  std::vector<pid_t> found;
  for (const auto& [pid, parent] : parents) {
    pid_t up = parent;
    for (int depth = 0; depth < 64 && up > 1 && up != ancestor; ++depth) {
      const auto next = parents.find(up);
      up = next == parents.end() ? 0 : next->second;
    }
    if (up == ancestor) found.push_back(pid);
  }
  return found;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

// In the child between fork and exec: only async-signal-safe calls, as other threads exist in the parent.
[[noreturn]] void run_child(const char* program, char* const* arguments, char* const* environment, int input,
                            int output, pid_t parent) {
  setpgid(0, 0);  // Ctrl-C on the terminal is for the coordinator, which ends the rest in order
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);  // it ended before the line above
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(input, 0);
  dup2(output, 1);
  dup2(output, 2);
  if (close_range(3, ~0U, 0) != 0) {
    for (int fd = 3; fd < 1024; ++fd) close(fd);
  }
  execve(program, arguments, environment);
  const char* reason = strerror(errno);
  [[maybe_unused]] ssize_t ignored = write(2, program, strlen(program));
  ignored = write(2, ": ", 2);
  ignored = write(2, reason, strlen(reason));
  ignored = write(2, "\n", 1);
  _exit(127);
}

}  // namespace

std::string LaunchExit::text() const {
  if (signal != 0) return "was killed by signal " + std::to_string(signal);
  // mpirun reports a rank's signal as 128 + signal.
  if (code > 128 && code < 128 + NSIG)
    return "ended with status " + std::to_string(code) + " (signal " + std::to_string(code - 128) + ")";
  return "ended with status " + std::to_string(code);
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

ChildProcess::ChildProcess(const std::filesystem::path& program, const std::vector<std::string>& arguments,
                           const std::vector<std::string>& environment, const std::filesystem::path& output_file) {
  const std::vector<char*> argument_list = pointers(arguments);
  const std::vector<char*> environment_list = pointers(environment);
  int file = -1;
  if (!output_file.empty()) {
    file = open(output_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) throw InputError(output_file.string() + ": cannot be opened for writing: " + error_text(errno));
  }
  int pipe_ends[2] = {-1, -1};
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (input < 0 || pipe2(pipe_ends, O_CLOEXEC) != 0) throw InputError("no pipe to the workers: " + error_text(errno));
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    run_child(program.c_str(), argument_list.data(), environment_list.data(), input, pipe_ends[1], parent);
  }
  const int code = errno;
  close(input);
  close(pipe_ends[1]);
  if (pid_ < 0) {
    close(pipe_ends[0]);
    if (file >= 0) close(file);
    throw InputError("cannot start " + program.string() + ": " + error_text(code));
  }
  setpgid(pid_, pid_);
  reader_ = std::thread([this, fd = pipe_ends[0], file] { read_output(fd, file); });
}

ChildProcess::~ChildProcess() {
  stop(milliseconds(0));
  stop_reading_ = true;
  reader_.join();
}

void ChildProcess::read_output(int fd, int file) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  char buffer[8192];
  while (true) {
    // A process that outlives the launch may hold the pipe open, so its end is not the only way out.
    pollfd entry{fd, POLLIN, 0};
    const int ready = poll(&entry, 1, 50);
    if (ready == 0 && stop_reading_) break;
    if (ready <= 0) continue;
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got == 0) break;
    if (got > 0) take_output(buffer, static_cast<std::size_t>(got), file);
  }
  close(fd);
  if (file >= 0) close(file);
}

void ChildProcess::take_output(const char* bytes, std::size_t count, int file) {
  // A full disk must not block the workers; what cannot be kept is dropped.
  if (file >= 0) [[maybe_unused]]
    const ssize_t ignored = write(file, bytes, count);
  const std::lock_guard lock(mutex_);
  if (lines_.empty()) lines_.emplace_back();
  for (std::size_t i = 0; i < count; ++i) {
    if (bytes[i] == '\n') {
      lines_.emplace_back();
      if (lines_.size() > kMaxLines + 1) lines_.pop_front();
    } else if (lines_.back().size() < kMaxLineBytes) {
      lines_.back().push_back(bytes[i]);
    }
  }
}

std::vector<std::string> ChildProcess::last_output() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  for (const std::string& line : lines_) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(line);
  }
  return lines;
}

std::optional<LaunchExit> ChildProcess::exited() {
  if (exit_) return exit_;
  int status = 0;
  const pid_t got = waitpid(pid_, &status, WNOHANG);
  if (got == pid_) {
    exit_ =
        WIFSIGNALED(status) ? LaunchExit{128 + WTERMSIG(status), WTERMSIG(status)} : LaunchExit{WEXITSTATUS(status), 0};
  }
  return exit_;
}

bool ChildProcess::wait_exit(Clock::time_point deadline) {
  while (!exited()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return true;
}

void ChildProcess::stop(milliseconds grace) {
  if (!exited()) {
    if (grace.count() > 0) {
      kill(pid_, SIGTERM);
      wait_exit(Clock::now() + grace);
    }
    // Not reaped yet, so the number is still that process.
    if (!exited()) {
      for (pid_t pid : descendants_of(pid_)) kill(pid, SIGKILL);
      kill(pid_, SIGKILL);
      wait_exit(Clock::now() + std::chrono::seconds(2));
    }
  }
  kill_orphans();
}

// With adopt_orphans(), processes that the launcher left behind are children of this process by now.
void ChildProcess::kill_orphans() {
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  const pid_t self = getpid();
  while (Clock::now() < deadline) {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const std::vector<pid_t> left = descendants_of(self);
    if (left.empty()) return;
    for (pid_t pid : left) kill(pid, SIGKILL);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

}  // namespace oomb::launch
