// One launch of the workers and the conversation with them, from the first connection to the last process's end.
//
// Every wait ends: with the answer, at its deadline, when a worker or the launcher is gone, or when the user asks for
// it.
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

/// What a worker tells when it is ready.
struct WorkerReady {
  std::string device;
  std::int64_t parameters = 0;
  std::int64_t resumed_step = 0;  // steps done by the checkpoint gone on from
  std::string checkpoint;         // its path, or empty
};

class WorkerSession {
 public:
  using Clock = std::chrono::steady_clock;

  /// `mode` is train, eval or bench; `output_file` may be empty (Launcher). Both references outlive the session.
  WorkerSession(const RunConfig& config, const std::string& mode, const std::filesystem::path& worker_program,
                const std::filesystem::path& output_file, launch::Launcher& launcher, status::Reporter& reporter);
  /// Ends what still runs.
  ~WorkerSession();

  /// Launches, and waits until the workers are ready. Throws as request() does.
  WorkerReady start();

  /// Sends a request and waits for its answer of type `answer`. WorkerLost when the worker is gone, stuck or breaks the
  /// protocol; InputError, ResourceError or WorkerLost when it says it failed; StoppedAtOnce after a second stop
  /// signal, or when stop_seconds have passed since the first.
  nlohmann::json request(const nlohmann::json& message, const char* answer);

  /// Asks the workers to end and waits for it. WorkerLost when they end with an error, or not in time.
  void finish();

  /// Ends every process now, or after `grace`.
  void end(std::chrono::milliseconds grace);

  /// "rank 0 on HOST (pid N)", for messages.
  std::string worker_name() const;

 private:
  nlohmann::json wait_for(const char* answer, double seconds, const std::string& activity);
  std::optional<nlohmann::json> take(const comm::ControlEvent& event, const char* answer, const std::string& activity);
  [[noreturn]] void fail_as_told(const nlohmann::json& message);
  enum class Remains { kRunning, kGone };  // whether the worker's process is expected to have ended
  [[noreturn]] void lost(const std::string& how, const std::string& phase, Remains remains);
  void check_stop();
  Clock::time_point stop_deadline();

  const RunConfig& config_;
  std::filesystem::path worker_program_;
  std::filesystem::path output_file_;
  launch::Launcher& launcher_;
  status::Reporter& reporter_;
  std::string secret_;
  std::unique_ptr<comm::ControlServer> server_;
  comm::WorkerIdentity worker_;
  bool joined_ = false;
  bool stoppable_ = false;  // from the first request on, a stop signal waits for the answer
  std::optional<Clock::time_point> stop_deadline_;
};

/// A field of a worker's message; WorkerLost when it is absent or of another type. A number may be null: NaN.
double number_of(const nlohmann::json& message, const char* key);
std::int64_t integer_of(const nlohmann::json& message, const char* key);
std::string text_of(const nlohmann::json& message, const char* key);

}  // namespace oomb::control
