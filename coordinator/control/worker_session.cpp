#include "coordinator/control/worker_session.h"

#include <limits>

#include "comm/control_codec.h"
#include "comm/control_messages.h"
#include "configs/error.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"

namespace oomb::control {
namespace {

using Clock = WorkerSession::Clock;
namespace message = comm::message;

constexpr std::chrono::milliseconds kTick{50};  // how soon signals and the launcher's end are noticed
constexpr const char* kHost = "127.0.0.1";

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
      secret_(comm::make_secret()) {
  comm::ControlServerOptions options;
  options.bind_address = kHost;
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

std::string WorkerSession::worker_name() const {
  return "rank " + std::to_string(worker_.rank) + " on " + worker_.host + " (pid " + std::to_string(worker_.pid) + ")";
}

void WorkerSession::lost(const std::string& how, const std::string& phase, Remains remains) {
  std::string text = "lost worker ";
  text += joined_ ? worker_name() : std::string("rank 0, before it connected");
  if (!phase.empty()) text += ", last phase \"" + phase + "\"";
  text += ": " + how;
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

void WorkerSession::fail_as_told(const nlohmann::json& failure) {
  const std::string kind = text_of(failure, "kind");
  const std::string text = text_of(failure, "message");
  if (kind == "input") throw InputError(text);
  if (kind == "resource") throw ResourceError(text);
  throw WorkerLost("worker " + worker_name() + " failed: " + text);
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

std::optional<nlohmann::json> WorkerSession::take(const comm::ControlEvent& event, const char* answer,
                                                  const std::string& activity) {
  using Kind = comm::ControlEvent::Kind;
  switch (event.kind) {
    case Kind::kStranger:
      reporter_.warning("control channel: " + event.text);
      return std::nullopt;
    case Kind::kJoined:
      worker_ = event.worker;
      joined_ = true;
      if (std::string_view(answer) == message::kHello) return nlohmann::json::object();
      return std::nullopt;
    case Kind::kLost:
      lost(event.text, event.phase, event.timed_out ? Remains::kRunning : Remains::kGone);
    case Kind::kMessage:
      break;
  }
  const std::string type = event.message["type"];
  if (type == message::kLog) {
    reporter_.log(level_of(event.message), text_of(event.message, "text"));
    return std::nullopt;
  }
  if (type == message::kFailed) fail_as_told(event.message);
  if (type != answer) {
    lost("it sent \"" + type.substr(0, 40) + "\" in answer to " + activity, server_->phase(worker_.rank),
         Remains::kRunning);
  }
  return event.message;
}

nlohmann::json WorkerSession::wait_for(const char* answer, double seconds, const std::string& activity) {
  const auto deadline = Clock::now() + to_duration(seconds);
  std::optional<Clock::time_point> exit_seen;
  for (;;) {
    check_stop();
    const auto now = Clock::now();
    if (now >= deadline)
      lost("no answer to " + activity + " within " + seconds_text(seconds), server_->phase(worker_.rank),
           Remains::kRunning);
    const auto event = server_->next(std::min(deadline, now + kTick));
    if (event) {
      if (auto result = take(*event, answer, activity)) return *std::move(result);
      continue;
    }
    // The worker's last words may still be on their way when its launcher ends.
    if (!exit_seen && launcher_.exited()) exit_seen = now;
    if (exit_seen && now - *exit_seen > std::chrono::milliseconds(500)) {
      lost("its process ended", server_->phase(worker_.rank), Remains::kGone);
    }
  }
}

WorkerReady WorkerSession::start() {
  launch::LaunchRequest request;
  request.worker = worker_program_;
  request.workers = static_cast<int>(config_.topology.workers);
  request.control_host = kHost;
  request.control_port = server_->port();
  request.control_secret = secret_;
  request.output_file = output_file_;
  launcher_.start(request);
  wait_for(message::kHello, config_.timeouts.connect_seconds, "the launch");
  const nlohmann::json ready = wait_for(message::kReady, config_.timeouts.start_seconds, "the start");
  WorkerReady result;
  result.device = text_of(ready, "device");
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

nlohmann::json WorkerSession::request(const nlohmann::json& request_message, const char* answer) {
  stoppable_ = true;
  server_->send(worker_.rank, request_message);
  return wait_for(answer, config_.timeouts.step_seconds, request_message["type"].get<std::string>());
}

void WorkerSession::finish() {
  server_->send(worker_.rank, {{"type", message::kFinish}});
  const auto deadline = Clock::now() + to_duration(config_.timeouts.shutdown_seconds);
  std::optional<launch::LaunchExit> exit;
  while (!(exit = launcher_.exited())) {
    if (stop_at_once()) throw StoppedAtOnce("ended at once, after the last checkpoint");
    if (Clock::now() >= deadline) {
      throw WorkerLost("worker " + worker_name() + " did not end within timeouts.shutdown_seconds (" +
                       seconds_text(config_.timeouts.shutdown_seconds) + "); its work was done");
    }
    const auto event = server_->next(Clock::now() + kTick);
    if (!event || event->kind != comm::ControlEvent::Kind::kMessage) continue;
    if (event->message["type"] == message::kFailed) fail_as_told(event->message);
    if (event->message["type"] == message::kLog) {
      reporter_.log(level_of(event->message), text_of(event->message, "text"));
    }
  }
  if (exit->code != 0) {
    throw WorkerLost("worker " + worker_name() + " did its work, but the launch " + exit->text());
  }
}

void WorkerSession::end(std::chrono::milliseconds grace) { launcher_.stop(grace); }

}  // namespace oomb::control
