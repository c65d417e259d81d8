// The coordinator's end of the control channel (control_messages.h): accepts the workers of one launch, and nobody
// else.
//
// A background thread runs the sockets; what happens is read as events, in order, by one thread of the owner. A
// connection that does not show the run's secret within a few seconds, or sends something that is no message, is closed
// and told as kStranger; it never disturbs the run. When too many connections have not said who they are, the oldest of
// them is closed for a new one, so that a flood keeps no worker out. A worker that breaks the protocol, closes its
// connection, or is silent for lost_seconds is told as kLost, once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "comm/control_client.h"

namespace oomb::comm {

struct WorkerIdentity {
  int rank = -1;
  int size = 0;
  std::string host;
  std::int64_t pid = 0;
};

struct ControlEvent {
  enum class Kind {
    kJoined,    // a worker has shown the secret and was welcomed
    kMessage,   // a worker sent `message`; heartbeats are not told
    kLost,      // the worker is gone: `text` says how, `phase` is the last one heard of
    kStranger,  // a connection was refused: `text` says why
  };
  Kind kind = Kind::kStranger;
  WorkerIdentity worker;
  nlohmann::json message;
  std::string text;
  std::string phase;
  bool timed_out = false;     // lost by silence: the process may still be there
  bool knows_secret = false;  // kStranger: a process of this launch, started wrongly
};

struct ControlServerOptions {
  std::string bind_address = "127.0.0.1";  // numeric; 0.0.0.0: all; the port is chosen by the system
  std::string secret;                      // make_secret()
  int workers = 1;                         // ranks 0 .. workers-1 may join, each once
  nlohmann::json welcome;                  // sent to each, with heartbeat_seconds and lost_seconds added
  double heartbeat_seconds = 1;
  double lost_seconds = 8;
  double hello_seconds = 5;  // until a new connection must have sent its hello
};

class ControlServer {
 public:
  using Clock = std::chrono::steady_clock;

  /// Listens. ControlError when it cannot.
  explicit ControlServer(const ControlServerOptions& options);
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  /// Closes all connections at once.
  ~ControlServer();

  std::uint16_t port() const;

  /// The next event; nothing when `deadline` passes first.
  std::optional<ControlEvent> next(Clock::time_point deadline);

  /// Queues a message for a worker; without effect when it is not connected (kLost tells).
  void send(int rank, const nlohmann::json& message);

  /// The phase a worker's last heartbeat told; empty when unknown.
  std::string phase(int rank) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::comm
