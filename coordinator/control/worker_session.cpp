#include "coordinator/control/worker_session.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "comm/control_codec.h"
#include "comm/control_messages.h"
#include "configs/error.h"
#include "coordinator/control/answers.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"

namespace oomb::control {
namespace {

using Clock = WorkerSession::Clock;
namespace message = comm::message;

constexpr std::chrono::milliseconds kTick{50};  // how soon signals and the launcher's end are noticed
constexpr std::size_t kNamedRanks = 4;          // workers that a message about several of them names
constexpr double kVerdictMargin = 1;            // seconds beyond lost_seconds for an accused worker's own failure

Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

LogLevel level_of(const nlohmann::json& log) {
  const std::string text = text_of(log, "level");
  for (LogLevel level : EnumTable<LogLevel>::values) {
    if (text == to_string(level)) return level;
  }
  return LogLevel::kInfo;
}

[[noreturn]] void bad_field(const nlohmann::json& message, const char* key) {
  throw WorkerLost("the worker broke the protocol: " + message.value("type", std::string("?")) + " without a valid " +
                   key);
}

}  // namespace

double number_of(const nlohmann::json& message, const char* key) {
  const auto entry = message.find(key);
  if (entry != message.end() && entry->is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (entry == message.end() || !entry->is_number()) bad_field(message, key);
  return entry->get<double>();
}

std::int64_t integer_of(const nlohmann::json& message, const char* key) {
  const auto entry = message.find(key);
  if (entry == message.end() || !entry->is_number_integer() || entry->get<std::int64_t>() < 0) bad_field(message, key);
  return entry->get<std::int64_t>();
}

std::string text_of(const nlohmann::json& message, const char* key) {
  const auto entry = message.find(key);
  if (entry == message.end() || !entry->is_string()) bad_field(message, key);
  return entry->get<std::string>();
}

WorkerSession::WorkerSession(const RunConfig& config, const std::string& mode,
                             const std::filesystem::path& worker_program, const std::filesystem::path& output_file,
                             launch::Launcher& launcher, status::Reporter& reporter)
    : config_(config),
      worker_program_(worker_program),
      output_file_(output_file),
      launcher_(launcher),
      reporter_(reporter),
      secret_(comm::make_secret()),
      workers_(static_cast<std::size_t>(config.topology.workers)),
      answers_(workers_.size()) {
  comm::ControlServerOptions options;
  options.bind_address = launcher.control_endpoint().bind_address;
  options.secret = secret_;
  options.workers = static_cast<int>(config.topology.workers);
  options.welcome = {{"mode", mode}, {"config", nlohmann::json::parse(to_json(config))}};
  options.heartbeat_seconds = config.timeouts.heartbeat_seconds;
  options.lost_seconds = config.timeouts.lost_seconds;
  try {
    server_ = std::make_unique<comm::ControlServer>(options);
  } catch (const comm::ControlError& error) {
    throw ResourceError(std::string("control channel: ") + error.what());
  }
}

WorkerSession::~WorkerSession() { launcher_.stop(std::chrono::milliseconds(0)); }

std::string WorkerSession::worker_name(int rank) const {
  const auto& worker = workers_[static_cast<std::size_t>(rank)];
  if (!worker) return "rank " + std::to_string(rank);
  return "rank " + std::to_string(rank) + " on " + worker->host + " (pid " + std::to_string(worker->pid) + ")";
}

std::string WorkerSession::description() const {
  if (workers_.size() == 1) return "worker " + worker_name(0);
  std::set<std::string> hosts;
  for (const auto& worker : workers_) hosts.insert(worker ? worker->host : "?");
  return std::to_string(workers_.size()) + " workers on " +
         (hosts.size() == 1 ? *hosts.begin() : std::to_string(hosts.size()) + " hosts");
}

std::string WorkerSession::lost_name(int rank) const {
  if (!workers_[static_cast<std::size_t>(rank)]) return worker_name(rank) + ", before it connected";
  const std::string phase = server_->phase(rank);
  return worker_name(rank) + (phase.empty() ? "" : ", last phase \"" + phase + "\"");
}

std::string WorkerSession::named(const std::vector<int>& ranks, std::string (WorkerSession::*name)(int) const) const {
  std::string text = ranks.size() == 1 ? "worker " : "workers ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamedRanks); ++i) {
    text += (i == 0 ? "" : "; ") + (this->*name)(ranks[i]);
  }
  if (ranks.size() > kNamedRanks) text += "; and " + std::to_string(ranks.size() - kNamedRanks) + " more";
  return text;
}

void WorkerSession::lost(const std::vector<int>& ranks, const std::string& how, Remains remains) {
  std::string text = "lost " + named(ranks, &WorkerSession::lost_name) + ": " + how;
  // The launcher's end tells how; mpirun takes two seconds for it.
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  std::optional<launch::LaunchExit> exit = launcher_.exited();
  while (!exit && remains == Remains::kGone && Clock::now() < deadline && !stop_at_once()) {
    server_->next(Clock::now() + kTick);
    exit = launcher_.exited();
  }
  if (exit) text += "; the launch " + exit->text();
  throw WorkerLost(text);
}

void WorkerSession::fail_as_told(const nlohmann::json& failure, int rank) {
  const std::string kind = text_of(failure, "kind");
  const std::string text = text_of(failure, "message");
  if (kind == "input") throw InputError(text);
  if (kind == "resource") throw ResourceError(text);
  throw WorkerLost("worker " + worker_name(rank) + " failed: " + text);
}

Clock::time_point WorkerSession::stop_deadline() {
  if (stop_signal() == 0) return Clock::time_point::max();
  if (!stop_deadline_) {
    stop_deadline_ = Clock::now() + to_duration(config_.timeouts.stop_seconds);
    if (stoppable_) reporter_.info("stopping after this step, with a checkpoint; once more to end at once");
  }
  return *stop_deadline_;
}

void WorkerSession::check_stop() {
  if (stop_at_once()) throw StoppedAtOnce("ended at once; steps since the last checkpoint are lost");
  if (stop_signal() != 0 && !stoppable_) throw StoppedAtOnce("ended before the first step");
  if (Clock::now() >= stop_deadline()) {
    throw StoppedAtOnce("the running step and its checkpoint took longer than timeouts.stop_seconds (" +
                        seconds_text(config_.timeouts.stop_seconds) + "); steps since the last checkpoint are lost");
  }
}

void WorkerSession::take_log(const nlohmann::json& message) {
  reporter_.log(level_of(message), text_of(message, "text"));
}

void WorkerSession::accuse(const nlohmann::json& failure, int reporter) {
  const std::int64_t accused = integer_of(failure, "peer");
  if (accused >= static_cast<std::int64_t>(workers_.size()) || accused == reporter) bad_field(failure, "peer");
  if (accusation_) return;
  accusation_ = Accusation{static_cast<int>(accused), worker_name(reporter) + " says: " + text_of(failure, "message"),
                           Clock::now() + to_duration(config_.timeouts.lost_seconds + kVerdictMargin)};
}

void WorkerSession::take_loss(const comm::ControlEvent& event) {
  const int rank = event.worker.rank;
  if (accusation_ && accusation_->accused != rank) return;
  lost({rank}, event.text + (accusation_ ? "; " + accusation_->report : ""),
       event.timed_out ? Remains::kRunning : Remains::kGone);
}

void WorkerSession::take_message(const comm::ControlEvent& event, const char* answer, const std::string& activity) {
  const int rank = event.worker.rank;
  const std::string type = event.message["type"];
  if (type == message::kLog) return take_log(event.message);
  if (type == message::kFailed) {
    if (text_of(event.message, "kind") == "peer") return accuse(event.message, rank);
    fail_as_told(event.message, rank);
  }
  // A quick worker is ready while others still connect.
  const bool early = std::string_view(answer) == message::kHello && type == message::kReady;
  if (type != answer && !early) {
    lost({rank}, "it sent \"" + type.substr(0, 40) + "\" in answer to " + activity, Remains::kRunning);
  }
  nlohmann::json& place = answers_[static_cast<std::size_t>(rank)];
  if (!place.is_null()) lost({rank}, "it answered " + activity + " twice", Remains::kRunning);
  place = event.message;
}

void WorkerSession::take(const comm::ControlEvent& event, const char* answer, const std::string& activity) {
  using Kind = comm::ControlEvent::Kind;
  switch (event.kind) {
    case Kind::kStranger:
      // A process that knows the secret belongs to this launch: it was started wrongly, and others wait for it.
      if (event.knows_secret && std::string_view(answer) == message::kHello)
        throw InputError("control channel: " + event.text);
      reporter_.warning("control channel: " + event.text);
      return;
    case Kind::kJoined:
      workers_[static_cast<std::size_t>(event.worker.rank)] = event.worker;
      if (workers_.size() > 1) reporter_.log(LogLevel::kDebug, "connected: " + worker_name(event.worker.rank));
      return;
    case Kind::kLost:
      return take_loss(event);
    case Kind::kMessage:
      return take_message(event, answer, activity);
  }
}

// Ranks that have not answered; for hello, not connected.
std::vector<int> WorkerSession::missing(const char* answer) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
    const bool there =
        std::string_view(answer) == message::kHello ? workers_[rank].has_value() : !answers_[rank].is_null();
    if (!there) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void WorkerSession::wait_for_all(const char* answer, double seconds, const std::string& activity) {
  const auto deadline = Clock::now() + to_duration(seconds);
  std::optional<Clock::time_point> exit_seen;
  while (true) {
    const std::vector<int> waiting_for = missing(answer);
    if (waiting_for.empty() && !accusation_) return;
    check_stop();
    const auto now = Clock::now();
    if (accusation_ && now >= accusation_->verdict)
      lost({accusation_->accused}, accusation_->report, Remains::kRunning);
    if (now >= deadline && !waiting_for.empty())
      lost(waiting_for, "no answer to " + activity + " within " + seconds_text(seconds), Remains::kRunning);
    if (const auto event = server_->next(now + kTick)) {
      take(*event, answer, activity);
      continue;
    }
    // The workers' last words may still be on their way when their launcher ends.
    if (!exit_seen && launcher_.exited()) exit_seen = now;
    if (!exit_seen || now - *exit_seen <= std::chrono::milliseconds(500)) continue;
    if (accusation_) lost({accusation_->accused}, accusation_->report, Remains::kGone);
    lost(waiting_for, waiting_for.size() == 1 ? "its process ended" : "their processes ended", Remains::kGone);
  }
}

WorkersReady WorkerSession::start() {
  launch::LaunchRequest request;
  request.worker = worker_program_;
  request.workers = static_cast<int>(config_.topology.workers);
  request.control_host = launcher_.control_endpoint().host;
  request.control_port = server_->port();
  request.control_secret = secret_;
  request.output_file = output_file_;
  launcher_.start(request);
  wait_for_all(message::kHello, config_.timeouts.connect_seconds, "the launch");
  wait_for_all(message::kReady, config_.timeouts.start_seconds, "the start");
  const nlohmann::json ready = merge_answers(answers_);
  WorkersReady result;
  std::set<std::string> devices;
  for (const nlohmann::json& answer : answers_) devices.insert(text_of(answer, "device"));
  for (const std::string& device : devices) result.device += (result.device.empty() ? "" : ", ") + device;
  result.parameters = integer_of(ready, "parameters");
  result.resumed_step = integer_of(ready, "resumed_step");
  result.checkpoint = text_of(ready, "checkpoint");
  const auto lines = ready.find("lines");
  if (lines != ready.end() && lines->is_array()) {
    for (const auto& line : *lines) {
      if (line.is_string()) reporter_.info(line.get<std::string>());
    }
  }
  return result;
}

void WorkerSession::send_to_all(const nlohmann::json& message) {
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) server_->send(static_cast<int>(rank), message);
}

nlohmann::json WorkerSession::request(const nlohmann::json& request_message, const char* answer) {
  stoppable_ = true;
  answers_.assign(workers_.size(), nullptr);
  send_to_all(request_message);
  wait_for_all(answer, config_.timeouts.step_seconds, request_message["type"].get<std::string>());
  return merge_answers(answers_);
}

void WorkerSession::finish() {
  send_to_all({{"type", message::kFinish}});
  std::vector<int> left(workers_.size());  // still connected
  std::iota(left.begin(), left.end(), 0);
  const auto deadline = Clock::now() + to_duration(config_.timeouts.shutdown_seconds);
  std::optional<launch::LaunchExit> exit;
  while (!(exit = launcher_.exited())) {
    if (stop_at_once()) throw StoppedAtOnce("ended at once, after the last checkpoint");
    if (Clock::now() >= deadline) {
      throw WorkerLost((left.empty() ? "the launcher" : named(left, &WorkerSession::worker_name)) +
                       " did not end within timeouts.shutdown_seconds (" +
                       seconds_text(config_.timeouts.shutdown_seconds) + "); the work was done");
    }
    const auto event = server_->next(Clock::now() + kTick);
    if (!event) continue;
    if (event->kind == comm::ControlEvent::Kind::kLost) std::erase(left, event->worker.rank);
    if (event->kind != comm::ControlEvent::Kind::kMessage) continue;
    if (event->message["type"] == message::kFailed) fail_as_told(event->message, event->worker.rank);
    if (event->message["type"] == message::kLog) take_log(event->message);
  }
  if (exit->code != 0) throw WorkerLost(description() + ": the work was done, but the launch " + exit->text());
}

void WorkerSession::end(std::chrono::milliseconds grace) { launcher_.stop(grace); }

}  // namespace oomb::control
