// A worker that speaks the protocol and computes nothing, told by FAKE_WORKER to misbehave. Its "loss" is 1/step and
// its checkpoints are files named by their step.
//
// FAKE_WORKER is a list of words, separated by commas. `word@N` acts when step N is asked for; `word#R` and `word@N#R`
// only on rank R:
//   crash@N stop@N hang@N exit@N    die by SIGABRT, stop itself, never answer, end with status 6
//   garbage@N oversized@N wrong@N badstep@N    break the protocol
//   disagree@N twice@N              a loss of its own, two answers
//   fail_input@N fail_resource@N fail_internal@N    tell a failure and end with status 9
//   accuse@N                        tell that rank `accused=R` is lost, and end with status 9
//   once                the above only if the file `crashed` in run.dir is not there yet; it is made then
//   slow=S              seconds per step
//   compute=S           told as compute_seconds
//   silent_exit         end with status 5 and a line on stderr before connecting
//   no_connect          never connect
//   no_ready            connect and never be ready
//   late                connect half a second later than the others
//   claim_rank=R claim_size=W    lie about itself
//   no_finish           ignore the request to end
//   bad_end             end with status 4 after the request to end
//   strangers           disturb the coordinator's port with nonsense before connecting
//   nan                 a loss that is no number
//   keep_orphan         leave a grandchild that ignores signals
#include <arpa/inet.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>

#include "comm/control_client.h"
#include "comm/control_messages.h"
#include "configs/run_config.h"

namespace {

using nlohmann::json;
namespace fs = std::filesystem;
namespace message = oomb::comm::message;

// Told by mpirun, or by srun with or without PMIx.
int from_launcher(std::initializer_list<const char*> variables, int otherwise) {
  for (const char* name : variables) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return otherwise;
}

int own_rank() { return from_launcher({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"}, 0); }

std::map<std::string, std::string> behaviour() {
  std::map<std::string, std::string> words;
  const char* text = std::getenv("FAKE_WORKER");
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string word; std::getline(stream, word, ',');) {
    if (const std::size_t rank = word.find('#'); rank != std::string::npos) {
      if (std::stoi(word.substr(rank + 1)) != own_rank()) continue;
      word.resize(rank);
    }
    const std::size_t split = word.find_first_of("@=");
    words[word.substr(0, split)] = split == std::string::npos ? "" : word.substr(split + 1);
  }
  return words;
}

void raw_connection(const oomb::comm::ControlAddress& address, const std::string& bytes, bool leave_open) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(address.port);
  inet_pton(AF_INET, address.host.c_str(), &where.sin_addr);
  if (connect(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0) std::perror("stranger");
  [[maybe_unused]] const ssize_t ignored = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (!leave_open) close(fd);
}

class FakeWorker {
 public:
  int run() {
    if (words_.contains("silent_exit")) {
      std::fprintf(stderr, "libsomething.so.7: cannot open shared object file\n");
      return 5;
    }
    if (words_.contains("no_connect")) std::this_thread::sleep_for(std::chrono::hours(1));
    if (words_.contains("keep_orphan") && fork() == 0) {
      signal(SIGTERM, SIG_IGN);
      for (;;) pause();
    }
    const auto address = oomb::comm::ControlAddress::from_environment();
    if (words_.contains("strangers")) {
      raw_connection(address, "GET / HTTP/1.1\r\n\r\n", false);
      raw_connection(address, std::string(4, '\xff'), false);
      raw_connection(address, "", true);
    }
    if (words_.contains("late")) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const int size = from_launcher({"OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 1);
    client_ = oomb::comm::ControlClient::connect(address,
                                                 {{"rank", number("claim_rank", own_rank())},
                                                  {"size", number("claim_size", size)},
                                                  {"host", "fakehost"},
                                                  {"pid", getpid()}},
                                                 std::chrono::steady_clock::now() + std::chrono::seconds(10));
    client_->on_lost([](const std::string&) { _exit(7); });
    config_ = oomb::run_config_from_json(client_->welcome()["config"].dump());
    if (words_.contains("no_ready")) std::this_thread::sleep_for(std::chrono::hours(1));
    client_->set_phase("load");
    resume();
    client_->send({{"type", message::kLog}, {"level", "info"}, {"text", "a line\nof the worker"}});
    client_->send({{"type", message::kReady},
                   {"device", "cpu"},
                   {"parameters", 1234},
                   {"resumed_step", done_},
                   {"checkpoint", checkpoint_},
                   {"lines", {"a line of ready, rank " + std::to_string(own_rank())}}});
    for (;;) {
      const auto request = client_->receive(std::chrono::milliseconds(1000));
      if (!request) continue;
      if ((*request)["type"] == message::kFinish && !words_.contains("no_finish")) break;
      answer(*request);
    }
    return words_.contains("bad_end") ? 4 : 0;
  }

 private:
  void resume() {
    using Kind = oomb::Resume::Kind;
    const auto& resume = config_.checkpoint.resume;
    if (resume.kind == Kind::kPath) {
      checkpoint_ = resume.path.string();
      done_ = std::stoll(resume.path.filename().string());
    } else if (resume.kind == Kind::kAuto && fs::exists(config_.checkpoint.dir)) {
      for (const auto& entry : fs::directory_iterator(config_.checkpoint.dir)) {
        const std::int64_t step = std::stoll(entry.path().filename().string());
        if (step > done_) checkpoint_ = entry.path().string();
        done_ = std::max(done_, step);
      }
    }
  }

  bool acts(const std::string& word, std::int64_t step) const {
    const auto entry = words_.find(word);
    if (entry == words_.end() || std::stoll(entry->second) != step) return false;
    const fs::path mark = config_.run.dir / "crashed";
    if (words_.contains("once") && fs::exists(mark)) return false;
    std::ofstream(mark) << step;
    return true;
  }

  int number(const std::string& word, int otherwise) const {
    const auto entry = words_.find(word);
    return entry == words_.end() ? otherwise : std::stoi(entry->second);
  }

  void fail(const char* kind) {
    json failure = {{"type", message::kFailed}, {"kind", kind}, {"message", std::string("told to fail: ") + kind}};
    if (failure["kind"] == "peer") failure["peer"] = number("accused", 0);
    client_->send(failure);
    client_.reset();
    _exit(9);
  }

  void misbehave(std::int64_t step) {
    client_->set_phase("pass 1");
    if (acts("crash", step)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::fprintf(stderr, "about to abort\n");
      abort();
    }
    if (acts("exit", step)) _exit(6);
    if (acts("stop", step)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      raise(SIGSTOP);
    }
    if (acts("hang", step)) std::this_thread::sleep_for(std::chrono::hours(1));
    if (acts("wrong", step)) client_->send({{"type", message::kEvaluated}, {"loss", 1.0}, {"tokens", 1}});
    if (acts("badstep", step)) client_->send({{"type", message::kStepDone}, {"step", step}, {"loss", "low"}});
    if (acts("fail_input", step)) fail("input");
    if (acts("fail_resource", step)) fail("resource");
    if (acts("fail_internal", step)) fail("internal");
    if (acts("accuse", step)) fail("peer");
    if (acts("twice", step)) client_->send(step_done(step, 0.001, 1.0 / static_cast<double>(step)));
    // The client refuses to send nonsense, so these go past it: its socket is the last one that was opened.
    if (acts("garbage", step)) write_raw(std::string("\0\0\0\5hello", 9));
    if (acts("oversized", step)) write_raw("\x7f\xff\xff\xff");
  }

  void write_raw(const std::string& bytes) {
    for (int fd = 3; fd < 64; ++fd) {
      sockaddr_in peer{};
      socklen_t size = sizeof(peer);
      const auto address = oomb::comm::ControlAddress::from_environment();
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && peer.sin_family == AF_INET &&
          ntohs(peer.sin_port) == address.port) {
        [[maybe_unused]] const ssize_t ignored = write(fd, bytes.data(), bytes.size());
      }
    }
    std::this_thread::sleep_for(std::chrono::hours(1));
  }

  json step_done(std::int64_t step, double seconds, double loss) {
    json message = {{"type", message::kStepDone},
                    {"step", step},
                    {"loss", loss},
                    {"tokens", 4097},
                    {"seconds", seconds + 0.001 * own_rank()},
                    {"grad_norm", 0.5},
                    {"lr", 1e-3},
                    {"hbm_peak_bytes", 0},
                    {"host_peak_bytes", 1 << 20},
                    {"extra", 7},
                    {"own", own_rank()}};
    if (words_.contains("compute")) message["compute_seconds"] = std::stod(words_["compute"]);
    return message;
  }

  void answer(const json& request) {
    if (request["type"] == message::kRunStep) {
      const std::int64_t step = request["step"];
      misbehave(step);
      const double seconds = words_.contains("slow") ? std::stod(words_["slow"]) : 0.001;
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      double loss = words_.contains("nan") ? std::numeric_limits<double>::quiet_NaN() : 1.0 / static_cast<double>(step);
      if (acts("disagree", step)) loss += 0.5;
      client_->send(step_done(step, seconds, loss));
      done_ = step;
    } else if (request["type"] == message::kCheckpoint) {
      fs::create_directories(config_.checkpoint.dir);
      checkpoint_ = (config_.checkpoint.dir / std::to_string(done_)).string();
      if (own_rank() == 0) std::ofstream(checkpoint_) << "checkpoint";
      client_->send({{"type", message::kCheckpointDone},
                     {"path", own_rank() == 0 ? checkpoint_ : ""},
                     {"bytes", 1024},
                     {"seconds", 0.25}});
    } else if (request["type"] == message::kEvaluate) {
      client_->send({{"type", message::kEvaluated}, {"loss", 2.5}, {"tokens", 999}});
    }
  }

  std::map<std::string, std::string> words_ = behaviour();
  std::unique_ptr<oomb::comm::ControlClient> client_;
  oomb::RunConfig config_;
  std::int64_t done_ = 0;
  std::string checkpoint_;
};

}  // namespace

int main() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    return FakeWorker().run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fake worker: %s\n", error.what());
    return 8;
  }
}
