#include "tests/coordinator/oomb_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace oomb::testing {
namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::temp_directory_path() / "oomb-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  fs::remove_all(path_, error);
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::vector<nlohmann::json> read_json_lines(const fs::path& path) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(read_file(path));
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(nlohmann::json::parse(line, nullptr, false));
    EXPECT_TRUE(lines.back().is_object()) << line;
  }
  return lines;
}

OombProcess::OombProcess(const fs::path& folder, const std::vector<std::string>& arguments,
                         const std::string& behaviour, const std::map<std::string, std::string>& environment,
                         bool terminal)
    : folder_(folder) {
  static std::atomic<int> count{0};
  mark_ = "OOMB_TEST_MARK=" + std::to_string(getpid()) + "-" + std::to_string(count++);
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
  variables.push_back(mark_);
  variables.push_back("FAKE_WORKER=" + behaviour);
  variables.push_back(std::string("OOMB_WORKER=") + FAKE_WORKER_PROGRAM);
  for (const auto& [name, value] : environment) {
    std::erase_if(variables, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    variables.push_back(name + "=" + value);
  }
  std::vector<std::string> words = {"oomb"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argument_list, variable_list;
  for (auto& word : words) argument_list.push_back(word.data());
  for (auto& variable : variables) variable_list.push_back(variable.data());
  argument_list.push_back(nullptr);
  variable_list.push_back(nullptr);
  int slave = -1;
  if (terminal && openpty(&terminal_, &slave, nullptr, nullptr, nullptr) != 0) throw std::runtime_error("openpty");
  const int out = terminal ? slave : open((folder / "out.txt").c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  const int err = open((folder / "err.txt").c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out, 1);
    dup2(err, 2);
    execve(OOMB_PROGRAM, argument_list.data(), variable_list.data());
    _exit(126);
  }
  close(out);
  close(err);
  if (terminal_ >= 0) fcntl(terminal_, F_SETFL, O_NONBLOCK);
}

OombProcess::~OombProcess() {
  if (!reaped_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (pid_t pid : family()) kill(pid, SIGKILL);
  if (terminal_ >= 0) close(terminal_);
}

bool OombProcess::running() {
  if (!reaped_ && waitpid(pid_, &status_, WNOHANG) == pid_) reaped_ = true;
  return !reaped_;
}

int OombProcess::wait(std::chrono::seconds limit) {
  if (!wait_until([this] { return !running(); }, limit)) return -1000;
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
}

void OombProcess::signal(int number) { kill(pid_, number); }

std::string OombProcess::out() const {
  if (terminal_ < 0) return read_file(folder_ / "out.txt");
  char buffer[4096];
  for (ssize_t got; (got = read(terminal_, buffer, sizeof(buffer))) > 0;)
    terminal_text_.append(buffer, static_cast<std::size_t>(got));
  return terminal_text_;
}

std::string OombProcess::err() const { return read_file(folder_ / "err.txt"); }

bool OombProcess::wait_until(const std::function<bool()>& condition, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (terminal_ >= 0) out();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

std::vector<pid_t> OombProcess::family() const {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = static_cast<pid_t>(std::stol(name));
    // A zombie has no environment, so it is not counted.
    const std::string environment = '\0' + read_file(entry.path() / "environ");
    if (pid != pid_ && environment.find('\0' + mark_ + '\0') != std::string::npos) found.push_back(pid);
  }
  return found;
}

}  // namespace oomb::testing
