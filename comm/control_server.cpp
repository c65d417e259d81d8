#include "comm/control_server.h"

#include <boost/asio.hpp>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>  // Boost 1.74's asio/awaitable.hpp uses std::exchange without including this; keep it before Asio

#include "comm/control_codec.h"
#include "comm/control_messages.h"

namespace oomb::comm {
namespace {

namespace asio = boost::asio;
using asio::awaitable;
using asio::redirect_error;
using asio::use_awaitable;
using asio::ip::tcp;
using Clock = ControlServer::Clock;
using boost::system::error_code;

constexpr std::size_t kMaxUnknownConnections = 64;  // besides one for each worker
constexpr std::size_t kMaxStrangerEvents = 256;     // waiting to be read; a flood of strangers must not fill the memory

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

std::string seconds_text(double count) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", count);
  return text;
}

// What a peer calls itself may go into a terminal: one line of harmless characters.
std::string printable(std::string text, std::size_t limit) {
  text.resize(std::min(text.size(), limit));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

std::string text_of(const nlohmann::json& object, const char* key, std::size_t limit) {
  const auto entry = object.find(key);
  return entry != object.end() && entry->is_string() ? printable(entry->get<std::string>(), limit) : std::string();
}

std::int64_t integer_of(const nlohmann::json& object, const char* key) {
  const auto entry = object.find(key);
  return entry != object.end() && entry->is_number_integer() ? entry->get<std::int64_t>() : -1;
}

struct Session {
  explicit Session(tcp::socket s) : socket(std::move(s)), timer(socket.get_executor()) {}
  tcp::socket socket;
  asio::steady_timer timer;
  Clock::time_point deadline;  // of the hello, then of the next sign of life
  bool timed_out = false;
  bool evicted = false;  // closed to make room
  bool done = false;
  bool joined = false;
  std::string peer;
  WorkerIdentity worker;
  std::deque<std::string> outbox;
  bool writing = false;
};
using SessionPtr = std::shared_ptr<Session>;

}  // namespace

struct ControlServer::Impl {
  ControlServerOptions options;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  std::uint16_t port = 0;
  std::map<int, SessionPtr> workers;  // io thread only
  std::list<SessionPtr> unknown;      // have not said who they are, oldest first; io thread only

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<ControlEvent> events;
  std::size_t stranger_events = 0;
  std::map<int, std::string> phases;
  std::thread thread;

  void tell(ControlEvent event) {
    const std::lock_guard lock(mutex);
    if (event.kind == ControlEvent::Kind::kStranger) {
      if (stranger_events >= kMaxStrangerEvents) return;
      ++stranger_events;
    }
    events.push_back(std::move(event));
    changed.notify_one();
  }

  void tell_stranger(const std::string& peer, const std::string& why, bool knows_secret) {
    ControlEvent event;
    event.knows_secret = knows_secret;
    event.text = "refused a connection from " + peer + ": " + why;
    tell(std::move(event));
  }

  // Closes the socket when nothing was heard in time. Asio 1.18 has no cancellation of a single operation.
  awaitable<void> watch(SessionPtr session) {
    bool grace = false;
    while (!session->done) {
      session->timer.expires_at(session->deadline);
      error_code error;
      co_await session->timer.async_wait(redirect_error(use_awaitable, error));
      if (session->done) co_return;
      if (Clock::now() < session->deadline) {
        grace = false;
        continue;
      }
      // After this process itself was stopped, signs of life may be waiting unread: look at them first.
      error_code ignored;
      if (!grace && session->socket.available(ignored) > 0) {
        grace = true;
        session->deadline = Clock::now() + std::chrono::milliseconds(200);
        continue;
      }
      session->timed_out = true;
      session->socket.close(ignored);
      co_return;
    }
  }

  // One message, or MalformedMessage or boost::system::system_error.
  awaitable<nlohmann::json> read_message(SessionPtr session, std::size_t limit) {
    char length[kLengthBytes];
    co_await asio::async_read(session->socket, asio::buffer(length), use_awaitable);
    std::string body(decode_length(length, limit), '\0');
    co_await asio::async_read(session->socket, asio::buffer(body), use_awaitable);
    co_return decode_body(body);
  }

  awaitable<void> write_outbox(SessionPtr session) {
    error_code error;
    while (!session->outbox.empty() && !error) {
      co_await asio::async_write(session->socket, asio::buffer(session->outbox.front()),
                                 redirect_error(use_awaitable, error));
      session->outbox.pop_front();
    }
    session->writing = false;
  }

  void start_write(const SessionPtr& session, std::string frame) {
    session->outbox.push_back(std::move(frame));
    if (session->writing) return;
    session->writing = true;  // before the coroutine starts, which is later
    asio::co_spawn(io, write_outbox(session), asio::detached);
  }

  // An empty text, or why this hello is not accepted. `secret_ok` tells whether the peer may be told.
  std::string examine(const nlohmann::json& hello, WorkerIdentity& worker, bool& secret_ok) const {
    const auto secret = hello.find("secret");
    secret_ok = hello["type"] == message::kHello && secret != hello.end() && secret->is_string() &&
                secrets_equal(secret->get_ref<const std::string&>(), options.secret);
    if (!secret_ok) return "it does not know the run's secret";
    const std::int64_t rank = integer_of(hello, "rank");
    const std::int64_t size = integer_of(hello, "size");
    worker.host = text_of(hello, "host", 255);
    worker.pid = integer_of(hello, "pid");
    if (size != options.workers) {
      return "it is one of " + std::to_string(size) + " MPI processes where " + std::to_string(options.workers) +
             " were launched (workers must be started by mpirun, or by srun --mpi=pmix)";
    }
    if (rank < 0 || rank >= options.workers) return "there is no rank " + std::to_string(rank);
    worker.rank = static_cast<int>(rank);
    worker.size = static_cast<int>(size);
    if (workers.contains(worker.rank)) return "rank " + std::to_string(rank) + " is connected already";
    return "";
  }

  awaitable<bool> greet(SessionPtr session) {
    bool accepted = false;
    std::string why;
    bool secret_ok = false;
    try {
      const nlohmann::json hello = co_await read_message(session, kMaxHelloBytes);
      why = examine(hello, session->worker, secret_ok);
      accepted = why.empty();
    } catch (const MalformedMessage& error) {
      why = std::string("it sent ") + error.what();
    } catch (const boost::system::system_error& error) {
      why = session->timed_out ? "it said nothing"
            : session->evicted ? "too many connections that have not said who they are"
                               : "it sent no complete hello (" + error.code().message() + ")";
    }
    if (accepted) {
      nlohmann::json welcome = options.welcome;
      welcome["type"] = message::kWelcome;
      welcome["heartbeat_seconds"] = options.heartbeat_seconds;
      welcome["lost_seconds"] = options.lost_seconds;
      workers[session->worker.rank] = session;
      session->joined = true;
      start_write(session, encode_message(welcome));
      co_return true;
    }
    if (secret_ok) {
      const std::string refusal = encode_message({{"type", message::kRefused}, {"reason", why}});
      error_code ignored;
      co_await asio::async_write(session->socket, asio::buffer(refusal), redirect_error(use_awaitable, ignored));
    }
    tell_stranger(session->peer, why, secret_ok);
    co_return false;
  }

  void heartbeat(const Session& session, const nlohmann::json& message) {
    const std::lock_guard lock(mutex);
    phases[session.worker.rank] = text_of(message, "phase", 200);
  }

  // Reads a welcomed worker's messages until it is gone; how it went is the result.
  awaitable<std::string> listen(SessionPtr session) {
    try {
      for (;;) {
        session->deadline = Clock::now() + seconds(options.lost_seconds);
        nlohmann::json message = co_await read_message(session, kMaxMessageBytes);
        if (message["type"] == message::kHeartbeat) {
          heartbeat(*session, message);
          continue;
        }
        ControlEvent event;
        event.kind = ControlEvent::Kind::kMessage;
        event.worker = session->worker;
        event.message = std::move(message);
        tell(std::move(event));
      }
    } catch (const MalformedMessage& error) {
      co_return std::string("it sent ") + error.what();
    } catch (const boost::system::system_error& error) {
      if (session->timed_out) co_return "nothing heard for " + seconds_text(options.lost_seconds);
      if (error.code() == asio::error::eof) co_return std::string("it closed the connection");
      co_return "connection: " + error.code().message();
    }
  }

  awaitable<void> serve(SessionPtr session) {
    unknown.push_back(session);
    session->deadline = Clock::now() + seconds(options.hello_seconds);
    asio::co_spawn(io, watch(session), asio::detached);
    std::string how;
    try {
      const bool accepted = co_await greet(session);
      unknown.remove(session);
      if (accepted) {
        ControlEvent event;
        event.kind = ControlEvent::Kind::kJoined;
        event.worker = session->worker;
        tell(std::move(event));
        session->deadline = Clock::now() + seconds(options.lost_seconds);
        session->timer.cancel();  // the watcher goes on with the new deadline
        how = co_await listen(session);
      }
    } catch (const std::exception& error) {
      how = error.what();
    }
    session->done = true;
    unknown.remove(session);
    session->timer.cancel();
    error_code ignored;
    session->socket.close(ignored);
    if (!session->joined) co_return;
    workers.erase(session->worker.rank);
    ControlEvent event;
    event.kind = ControlEvent::Kind::kLost;
    event.worker = session->worker;
    event.text = how;
    event.phase = phase_of(session->worker.rank);
    event.timed_out = session->timed_out;
    tell(std::move(event));
  }

  awaitable<void> accept_all() {
    for (;;) {
      error_code error;
      tcp::socket socket = co_await acceptor.async_accept(redirect_error(use_awaitable, error));
      if (error == asio::error::operation_aborted) co_return;
      if (error) {  // such as no free descriptors: others will be closed
        asio::steady_timer pause(io, std::chrono::milliseconds(100));
        co_await pause.async_wait(use_awaitable);
        continue;
      }
      const tcp::endpoint endpoint = socket.remote_endpoint(error);
      const std::string peer = error ? "a closed connection" : endpoint.address().to_string();
      if (unknown.size() >= kMaxUnknownConnections + static_cast<std::size_t>(options.workers)) {
        // A worker says who it is at once, so the oldest is the least likely to be one.
        const SessionPtr oldest = unknown.front();
        unknown.pop_front();
        oldest->evicted = true;
        oldest->socket.close(error);
      }
      socket.set_option(tcp::no_delay(true), error);
      auto session = std::make_shared<Session>(std::move(socket));
      session->peer = peer;
      asio::co_spawn(io, serve(session), asio::detached);
    }
  }

  std::string phase_of(int rank) const {
    const std::lock_guard lock(mutex);
    const auto entry = phases.find(rank);
    return entry == phases.end() ? std::string() : entry->second;
  }

  void run() {
    // Signals belong to the main thread.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    io.run();
  }
};

ControlServer::ControlServer(const ControlServerOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  try {
    const tcp::endpoint endpoint(asio::ip::make_address(options.bind_address), 0);
    impl_->acceptor.open(endpoint.protocol());
    impl_->acceptor.bind(endpoint);
    impl_->acceptor.listen();
    impl_->port = impl_->acceptor.local_endpoint().port();
  } catch (const boost::system::system_error& error) {
    throw ControlError("cannot listen on " + options.bind_address + ": " + error.code().message());
  }
  asio::co_spawn(impl_->io, impl_->accept_all(), asio::detached);
  Impl* raw = impl_.get();
  impl_->thread = std::thread([raw] { raw->run(); });
}

ControlServer::~ControlServer() {
  impl_->io.stop();
  impl_->thread.join();
}

std::uint16_t ControlServer::port() const { return impl_->port; }

std::optional<ControlEvent> ControlServer::next(Clock::time_point deadline) {
  std::unique_lock lock(impl_->mutex);
  if (!impl_->changed.wait_until(lock, deadline, [this] { return !impl_->events.empty(); })) return std::nullopt;
  ControlEvent event = std::move(impl_->events.front());
  impl_->events.pop_front();
  if (event.kind == ControlEvent::Kind::kStranger) --impl_->stranger_events;
  return event;
}

void ControlServer::send(int rank, const nlohmann::json& message) {
  asio::post(impl_->io, [impl = impl_.get(), rank, frame = encode_message(message)] {
    const auto entry = impl->workers.find(rank);
    if (entry != impl->workers.end()) impl->start_write(entry->second, frame);
  });
}

std::string ControlServer::phase(int rank) const { return impl_->phase_of(rank); }

}  // namespace oomb::comm
