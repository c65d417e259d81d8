// One launch of the workers and the conversation with them, from the first connection to the last process's end.
//
// Every wait ends: with all workers' answers, at its deadline, when a worker or the launcher is gone, or when the user
// asks for it. The failure that is told is the first cause: workers that say they lost a peer, and workers whose
// connection ends after that, are consequences of that peer's loss (see Accusation).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "comm/control_server.h"
#include "configs/run_config.h"
#include "coordinator/launch/launcher.h"
#include "coordinator/status/reporter.h"

namespace oomb::control {

/// What the workers tell when all are ready.
struct WorkersReady {
  std::string device;  // of the workers, those that differ separated by commas
  std::int64_t parameters = 0;
  std::int64_t resumed_step = 0;  // steps done by the checkpoint gone on from
  std::string checkpoint;         // its path, or empty
};

class WorkerSession {
 public:
  using Clock = std::chrono::steady_clock;

  /// `mode` is train, eval or bench; `output_file` may be empty (Launcher). All references outlive the session.
  WorkerSession(const RunConfig& config, const std::string& mode, const std::filesystem::path& worker_program,
                const std::filesystem::path& output_file, launch::Launcher& launcher, status::Reporter& reporter);
  /// Ends what still runs.
  ~WorkerSession();

  /// Launches, and waits until all workers are ready. Throws as request() does.
  WorkersReady start();

  /// Sends a request to every worker and waits for the answers of type `answer`, merged (answers.h). WorkerLost when a
  /// worker is gone, stuck or breaks the protocol; InputError, ResourceError or WorkerLost when one says it failed;
  /// StoppedAtOnce after a second stop signal, or when stop_seconds have passed since the first.
  nlohmann::json request(const nlohmann::json& message, const char* answer);

  /// The answers to the last request, by rank.
  const std::vector<nlohmann::json>& answers() const { return answers_; }

  /// Asks the workers to end and waits for it. WorkerLost when they end with an error, or not in time.
  void finish();

  /// Ends every process now, or after `grace`.
  void end(std::chrono::milliseconds grace);

  /// "rank R on HOST (pid N)", for messages.
  std::string worker_name(int rank) const;

  /// "worker rank 0 on HOST (pid N)", or "W workers on HOST" or "on N hosts".
  std::string description() const;

 private:
  // A worker said that it lost a peer. The peer's own failure, if it is told or its silence noticed in time, says more;
  // until then other workers' ends are taken as consequences.
  struct Accusation {
    int accused = -1;
    std::string report;
    Clock::time_point verdict;  // from then on the accused counts as lost
  };
  enum class Remains { kRunning, kGone };  // whether the worker's process is expected to have ended

  void wait_for_all(const char* answer, double seconds, const std::string& activity);
  void take(const comm::ControlEvent& event, const char* answer, const std::string& activity);
  void take_message(const comm::ControlEvent& event, const char* answer, const std::string& activity);
  void take_loss(const comm::ControlEvent& event);
  void take_log(const nlohmann::json& message);
  void accuse(const nlohmann::json& failure, int reporter);
  std::vector<int> missing(const char* answer) const;
  [[noreturn]] void fail_as_told(const nlohmann::json& message, int rank);
  [[noreturn]] void lost(const std::vector<int>& ranks, const std::string& how, Remains remains);
  std::string lost_name(int rank) const;
  std::string named(const std::vector<int>& ranks, std::string (WorkerSession::*name)(int) const) const;
  void send_to_all(const nlohmann::json& message);
  void check_stop();
  Clock::time_point stop_deadline();

  const RunConfig& config_;
  std::filesystem::path worker_program_;
  std::filesystem::path output_file_;
  launch::Launcher& launcher_;
  status::Reporter& reporter_;
  std::string secret_;
  std::unique_ptr<comm::ControlServer> server_;
  std::vector<std::optional<comm::WorkerIdentity>> workers_;  // by rank, once connected
  std::vector<nlohmann::json> answers_;                       // by rank; null: none yet
  std::optional<Accusation> accusation_;
  bool stoppable_ = false;  // from the first request on, a stop signal waits for the answer
  std::optional<Clock::time_point> stop_deadline_;
};

/// A field of a worker's message; WorkerLost when it is absent or of another type. A number may be null: NaN.
double number_of(const nlohmann::json& message, const char* key);
std::int64_t integer_of(const nlohmann::json& message, const char* key);
std::string text_of(const nlohmann::json& message, const char* key);

}  // namespace oomb::control
