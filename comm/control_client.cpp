#include "comm/control_client.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "comm/control_codec.h"
#include "comm/control_messages.h"

namespace oomb::comm {
namespace {

using Clock = ControlClient::Clock;
using std::chrono::milliseconds;

constexpr milliseconds kPhaseSpacing{20};          // phases may change per layer; the coordinator needs the latest only
constexpr std::size_t kMaxQueuedBytes = 16 << 20;  // a coordinator that does not read is treated as gone beyond this
constexpr std::size_t kMaxInbox = 1024;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string error_text(int code) { return std::generic_category().message(code); }

int milliseconds_until(Clock::time_point when) {
  const auto left = std::chrono::ceil<milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

// Waits for events on a socket; false when the deadline has passed.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) throw ControlError("poll: " + error_text(errno));
  }
}

void set_option(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); }

Descriptor connect_socket(const ControlAddress& address, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  const std::string where = "coordinator at " + address.host + ":" + std::to_string(address.port);
  if (failed != 0) throw ControlError(where + ": " + gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(list, freeaddrinfo);
  std::string reason = "no address";
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    Descriptor fd(socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, entry->ai_protocol));
    if (fd.get() < 0) {
      reason = error_text(errno);
      continue;
    }
    int code = 0;
    if (::connect(fd.get(), entry->ai_addr, entry->ai_addrlen) != 0) {
      code = errno;
      if (code == EINPROGRESS) {
        if (!wait_for(fd.get(), POLLOUT, deadline)) throw ControlError(where + ": no answer in time");
        socklen_t size = sizeof(code);
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &size);
      }
    }
    if (code == 0) return fd;
    reason = error_text(code);
  }
  throw ControlError(where + ": " + reason);
}

void write_all(int fd, std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd, POLLOUT, deadline)) throw ControlError("coordinator does not take the greeting in time");
    } else if (errno != EINTR) {
      throw ControlError("greeting the coordinator: " + error_text(errno));
    }
  }
}

void read_exactly(int fd, char* bytes, std::size_t count, Clock::time_point deadline) {
  while (count > 0) {
    const ssize_t got = recv(fd, bytes, count, 0);
    if (got > 0) {
      bytes += got;
      count -= static_cast<std::size_t>(got);
    } else if (got == 0) {
      throw ControlError("coordinator closed the connection without a welcome (wrong secret?)");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd, POLLIN, deadline)) throw ControlError("coordinator does not answer in time");
    } else if (errno != EINTR) {
      throw ControlError("waiting for the welcome: " + error_text(errno));
    }
  }
}

nlohmann::json read_message(int fd, Clock::time_point deadline) {
  char length[kLengthBytes];
  read_exactly(fd, length, sizeof(length), deadline);
  try {
    std::string body(decode_length(length, kMaxMessageBytes), '\0');
    read_exactly(fd, body.data(), body.size(), deadline);
    return decode_body(body);
  } catch (const MalformedMessage& error) {
    throw ControlError(std::string("coordinator sent ") + error.what());
  }
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    throw ControlError(std::string(name) + " is not set: workers are started by `oomb train`, not by hand");
  }
  return value;
}

double positive_number(const nlohmann::json& object, const char* key) {
  const auto entry = object.find(key);
  if (entry == object.end() || !entry->is_number() || !(entry->get<double>() > 0)) {
    throw ControlError(std::string("coordinator's welcome has no valid ") + key);
  }
  return std::min(entry->get<double>(), 1e6);
}

}  // namespace

ControlAddress ControlAddress::from_environment() {
  ControlAddress address{environment(kHostVariable), 0, environment(kSecretVariable)};
  const std::string port = environment(kPortVariable);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || end != port.data() + port.size() || address.port == 0) {
    throw ControlError(std::string(kPortVariable) + "=" + port + " is not a port");
  }
  return address;
}

struct ControlClient::Impl {
  Descriptor socket;
  Descriptor wake;
  nlohmann::json welcome;
  std::chrono::nanoseconds heartbeat_interval{};

  mutable std::mutex mutex;
  std::condition_variable incoming;  // inbox or is_lost changed
  std::condition_variable drained;   // outbox became empty or is_lost changed
  std::deque<nlohmann::json> inbox;
  std::deque<std::string> outbox;
  std::size_t outbox_bytes = 0;
  std::string phase = "start";
  bool phase_changed = false;
  bool closing = false;
  Clock::time_point close_deadline{};
  std::string lost_reason;
  std::function<void(const std::string&)> lost_callback;
  std::atomic<bool> is_lost{false};

  // Used by the background thread only.
  std::string input;
  std::size_t front_sent = 0;
  Clock::time_point next_heartbeat{};
  Clock::time_point last_heartbeat{};
  std::thread thread;

  void notify() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(wake.get(), &one, sizeof(one));  // fails only if already signalled
  }

  void queue(std::string frame) {  // with the mutex held
    outbox_bytes += frame.size();
    outbox.push_back(std::move(frame));
  }

  void queue_heartbeat_if_due() {
    const std::lock_guard lock(mutex);
    const auto now = Clock::now();
    if (phase_changed) next_heartbeat = std::min(next_heartbeat, last_heartbeat + kPhaseSpacing);
    // Heartbeats do not pile up behind a coordinator that does not read.
    if (closing || now < next_heartbeat || !outbox.empty()) return;
    queue(encode_message({{"type", message::kHeartbeat}, {"phase", phase}}));
    phase_changed = false;
    last_heartbeat = now;
    next_heartbeat = now + heartbeat_interval;
  }

  // Sends what the socket takes. An empty text, or why the channel is gone.
  std::string send_some() {
    std::unique_lock lock(mutex);
    while (!outbox.empty()) {
      const std::string& frame = outbox.front();
      const ssize_t sent = ::send(socket.get(), frame.data() + front_sent, frame.size() - front_sent, MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? "" : "sending: " + error_text(errno);
      }
      front_sent += static_cast<std::size_t>(sent);
      if (front_sent < frame.size()) continue;
      outbox_bytes -= frame.size();
      outbox.pop_front();
      front_sent = 0;
    }
    drained.notify_all();
    return "";
  }

  std::string receive_some() {
    char buffer[16384];
    for (;;) {
      const ssize_t got = recv(socket.get(), buffer, sizeof(buffer), 0);
      if (got == 0) return "the coordinator closed the connection";
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? "" : "receiving: " + error_text(errno);
      }
      input.append(buffer, static_cast<std::size_t>(got));
      try {
        take_messages();
      } catch (const std::exception& error) {
        return std::string("the coordinator sent ") + error.what();
      }
    }
  }

  void take_messages() {
    std::size_t begin = 0;
    while (input.size() - begin >= kLengthBytes) {
      const std::size_t length =
          decode_length(std::span<const char, kLengthBytes>(input.data() + begin, kLengthBytes), kMaxMessageBytes);
      if (input.size() - begin - kLengthBytes < length) break;
      nlohmann::json message = decode_body(std::string_view(input).substr(begin + kLengthBytes, length));
      begin += kLengthBytes + length;
      const std::lock_guard lock(mutex);
      if (inbox.size() >= kMaxInbox) throw MalformedMessage("more messages than are being read");
      inbox.push_back(std::move(message));
      incoming.notify_all();
    }
    input.erase(0, begin);
  }

  void declare_lost(const std::string& reason) {
    std::function<void(const std::string&)> callback;
    {
      const std::lock_guard lock(mutex);
      lost_reason = reason;
      is_lost = true;
      if (!closing) callback = lost_callback;
      incoming.notify_all();
      drained.notify_all();
    }
    if (callback) callback(reason);
  }

  // Whether the background thread has nothing left to do; also the poll's timeout.
  bool finished(int* timeout) {
    const std::lock_guard lock(mutex);
    if (closing && (outbox.empty() || Clock::now() >= close_deadline)) return true;
    auto until = next_heartbeat;
    if (!outbox.empty()) until = Clock::now() + heartbeat_interval;  // heartbeats wait for the socket
    if (closing) until = std::min(until, close_deadline);
    *timeout = milliseconds_until(until);
    return false;
  }

  void run() {
    std::string reason;
    int timeout = 0;
    while (reason.empty()) {
      queue_heartbeat_if_due();
      reason = send_some();
      if (!reason.empty() || finished(&timeout)) break;
      bool sending = false;
      {
        const std::lock_guard lock(mutex);
        sending = !outbox.empty();
      }
      pollfd entries[2] = {{socket.get(), static_cast<short>(POLLIN | (sending ? POLLOUT : 0)), 0},
                           {wake.get(), POLLIN, 0}};
      if (poll(entries, 2, timeout) < 0 && errno != EINTR) reason = "poll: " + error_text(errno);
      if (entries[1].revents != 0) {
        std::uint64_t count;
        [[maybe_unused]] const ssize_t ignored = read(wake.get(), &count, sizeof(count));
      }
      if (reason.empty() && entries[0].revents != 0) reason = receive_some();
    }
    if (!reason.empty()) {
      receive_some();  // what had arrived before a failed send, such as a last request
      declare_lost(reason);
      return;
    }
    // Closing with unread input would reset the connection and could take the last message with it: end our side, then
    // read until the coordinator has ended its own.
    shutdown(socket.get(), SHUT_WR);
    char rest[4096];
    try {
      while (wait_for(socket.get(), POLLIN, close_deadline) && recv(socket.get(), rest, sizeof(rest), 0) > 0) {
      }
    } catch (const ControlError&) {
    }
  }
};

ControlClient::ControlClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::unique_ptr<ControlClient> ControlClient::connect(const std::string& host, std::uint16_t port,
                                                      const std::string& secret, const nlohmann::json& hello,
                                                      Clock::time_point deadline) {
  return connect(ControlAddress{host, port, secret}, hello, deadline);
}

std::unique_ptr<ControlClient> ControlClient::connect(const ControlAddress& address, const nlohmann::json& hello,
                                                      Clock::time_point deadline) {
  auto impl = std::make_unique<Impl>();
  impl->socket = connect_socket(address, deadline);
  const int fd = impl->socket.get();
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);

  nlohmann::json greeting = hello;
  greeting["type"] = message::kHello;
  greeting["secret"] = address.secret;
  write_all(fd, encode_message(greeting), deadline);
  nlohmann::json answer = read_message(fd, deadline);
  if (answer["type"] == message::kRefused) {
    throw ControlError("coordinator refuses this worker: " + answer.value("reason", std::string("no reason given")));
  }
  if (answer["type"] != message::kWelcome)
    throw ControlError("coordinator answered with something else than a welcome");
  impl->heartbeat_interval = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(positive_number(answer, "heartbeat_seconds")));
  // A cut link is noticed by the kernel; a coordinator that is only stopped for a while keeps its workers.
  const int lost = std::max(1, static_cast<int>(positive_number(answer, "lost_seconds")));
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, lost / 4));
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, lost / 4));
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, std::min(lost, 100'000) * 1000);
  impl->welcome = std::move(answer);
  impl->wake = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (impl->wake.get() < 0) throw ControlError("eventfd: " + error_text(errno));
  Impl* raw = impl.get();
  impl->thread = std::thread([raw] { raw->run(); });
  return std::unique_ptr<ControlClient>(new ControlClient(std::move(impl)));
}

ControlClient::~ControlClient() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
    impl_->close_deadline = Clock::now() + std::chrono::seconds(1);
  }
  impl_->notify();
  impl_->thread.join();
}

const nlohmann::json& ControlClient::welcome() const { return impl_->welcome; }

void ControlClient::send(const nlohmann::json& message) {
  std::string frame;
  try {
    frame = encode_message(message);
  } catch (const std::length_error& error) {
    throw ControlError(error.what());
  }
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->is_lost) throw ControlError("control channel lost: " + impl_->lost_reason);
    if (impl_->outbox_bytes + frame.size() > kMaxQueuedBytes) {
      throw ControlError("the coordinator does not read: " + std::to_string(impl_->outbox_bytes) +
                         " bytes are waiting");
    }
    impl_->queue(std::move(frame));
  }
  impl_->notify();
}

bool ControlClient::flush(std::chrono::milliseconds timeout) {
  std::unique_lock lock(impl_->mutex);
  impl_->drained.wait_for(lock, timeout, [this] { return impl_->outbox.empty() || impl_->is_lost; });
  return impl_->outbox.empty() && !impl_->is_lost;
}

std::optional<nlohmann::json> ControlClient::receive(std::chrono::milliseconds timeout) {
  std::unique_lock lock(impl_->mutex);
  impl_->incoming.wait_for(lock, timeout, [this] { return !impl_->inbox.empty() || impl_->is_lost; });
  if (impl_->inbox.empty()) return std::nullopt;
  nlohmann::json message = std::move(impl_->inbox.front());
  impl_->inbox.pop_front();
  return message;
}

void ControlClient::set_phase(std::string_view phase) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->phase == phase) return;
    impl_->phase = std::string(phase.substr(0, 200));
    impl_->phase_changed = true;
  }
  impl_->notify();
}

bool ControlClient::lost() const { return impl_->is_lost; }

void ControlClient::on_lost(std::function<void(const std::string& reason)> callback) {
  std::string reason;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->lost_callback = callback;
    if (!impl_->is_lost || impl_->closing) return;
    reason = impl_->lost_reason;
  }
  callback(reason);
}

}  // namespace oomb::comm
