// The worker's end of the control channel (control_messages.h): a blocking facade over a socket that one background
// thread owns. The thread sends what is queued and a heartbeat with the current phase at the interval the coordinator
// asked for, so a long computation does not look like a dead worker.
//
// All members may be called from any thread. None waits longer than it is told.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace oomb::comm {

/// The channel cannot be made, or is used after it is gone.
class ControlError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where the coordinator is, and the secret of its run.
struct ControlAddress {
  std::string host;
  std::uint16_t port = 0;
  std::string secret;
  /// From the variables of control_messages.h; ControlError when one is missing or bad.
  static ControlAddress from_environment();
};

class ControlClient {
 public:
  using Clock = std::chrono::steady_clock;

  /// Connects, sends `hello` (an object with rank, size, host, pid; type and secret are added) and waits for the
  /// answer. ControlError when that has not succeeded by `deadline` or the coordinator refuses.
  static std::unique_ptr<ControlClient> connect(const ControlAddress& address, const nlohmann::json& hello,
                                                Clock::time_point deadline);

  /// The connect form with the address spelled out.
  static std::unique_ptr<ControlClient> connect(const std::string& host, std::uint16_t port, const std::string& secret,
                                                const nlohmann::json& hello, Clock::time_point deadline);

  ControlClient(const ControlClient&) = delete;
  ControlClient& operator=(const ControlClient&) = delete;

  /// Sends what is queued (for at most a second) and closes. Never throws.
  ~ControlClient();

  /// The coordinator's welcome: config, mode, ...
  const nlohmann::json& welcome() const;

  /// Queues an object with a `type`. ControlError when it is longer than kMaxMessageBytes or the channel is lost.
  void send(const nlohmann::json& message);

  /// Waits until all that was queued has been handed to the kernel. False when `timeout` ends first or the channel is
  /// lost.
  bool flush(std::chrono::milliseconds timeout);

  /// The next message from the coordinator; nothing when `timeout` ends first. Once the channel is lost, messages that
  /// had arrived are still handed out, then nothing, at once.
  std::optional<nlohmann::json> receive(std::chrono::milliseconds timeout);

  /// What heartbeats say from now on. A change is sent soon (within about 20 ms), without waiting for it.
  void set_phase(std::string_view phase);

  /// True once the coordinator is gone (closed, unreachable, or speaking nonsense). Never false again.
  bool lost() const;

  /// Called once, on the background thread, when the channel is lost; at once if it already is. Not called for a
  /// channel that its owner closes. A worker ends its process here, as its main thread may be deep in a computation.
  void on_lost(std::function<void(const std::string& reason)> callback);

 private:
  struct Impl;
  explicit ControlClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace oomb::comm
