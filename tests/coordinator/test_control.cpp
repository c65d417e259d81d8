// The control channel: framing, the secret, workers that come and go, strangers.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include "comm/control_client.h"
#include "comm/control_codec.h"
#include "comm/control_messages.h"
#include "comm/control_server.h"

namespace oomb::comm {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using Kind = ControlEvent::Kind;

std::string frame(const std::string& body) {
  const auto size = static_cast<std::uint32_t>(body.size());
  std::string text;
  for (int shift = 24; shift >= 0; shift -= 8) text.push_back(static_cast<char>((size >> shift) & 255));
  return text + body;
}

TEST(ControlCodec, LengthIsBigEndianBeforeJson) {
  EXPECT_EQ(encode_message({{"type", "x"}}), std::string("\0\0\0\x0c{\"type\":\"x\"}", 16));
  const char length[] = {1, 2, 3, 4};
  EXPECT_EQ(decode_length(length, 1 << 30), 0x01020304u);
  EXPECT_THROW(decode_length(length, 0x01020303), MalformedMessage);
  const char zero[] = {0, 0, 0, 0};
  EXPECT_THROW(decode_length(zero, 100), MalformedMessage);
  const char high[] = {-1, -1, -1, -1};
  EXPECT_THROW(decode_length(high, kMaxMessageBytes), MalformedMessage);
}

TEST(ControlCodec, OnlyObjectsWithATypePass) {
  EXPECT_EQ(decode_body(R"({"type":"a","n":1})"), (json{{"type", "a"}, {"n", 1}}));
  for (const std::string& body :
       {std::string("hello"), std::string("[1]"), std::string("{}"), std::string("{\"type\":1}"),
        std::string("{\"type\":\"a\"} x"), std::string("\xff\xfe"), std::string(1, '\0'), std::string(500000, '['),
        "{\"type\":\"a\",\"b\":" + std::string(300000, '[')}) {
    EXPECT_THROW(decode_body(body), MalformedMessage) << body.substr(0, 20);
  }
}

TEST(ControlCodec, OddValuesAreMadeHarmless) {
  const std::string text =
      encode_message({{"type", "a"}, {"x", std::numeric_limits<double>::infinity()}, {"s", "\xff"}});
  const json back = decode_body(std::string_view(text).substr(4));
  EXPECT_TRUE(back["x"].is_null());
  EXPECT_EQ(back["s"], "\xef\xbf\xbd");
  EXPECT_THROW(encode_message({{"type", "a"}, {"s", std::string(kMaxMessageBytes, 'x')}}), std::length_error);
}

TEST(ControlCodec, Secrets) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) seen.insert(make_secret());
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(seen.begin()->size(), 64u);
  EXPECT_TRUE(secrets_equal("abc", "abc"));
  EXPECT_FALSE(secrets_equal("abc", "abd"));
  EXPECT_FALSE(secrets_equal("xbc", "abc"));
  EXPECT_FALSE(secrets_equal("abc", "abcd"));
  EXPECT_FALSE(secrets_equal("", "a"));
}

class ControlTest : public ::testing::Test {
 protected:
  void start(int workers = 1, double lost_seconds = 5, double hello_seconds = 5) {
    options_.secret = make_secret();
    options_.workers = workers;
    options_.welcome = {{"mode", "train"}, {"config", json::object()}};
    options_.heartbeat_seconds = 0.05;
    options_.lost_seconds = lost_seconds;
    options_.hello_seconds = hello_seconds;
    server_ = std::make_unique<ControlServer>(options_);
  }

  json hello(int rank = 0, int size = 1) const {
    return {{"rank", rank}, {"size", size}, {"host", "here"}, {"pid", 4711}};
  }

  std::unique_ptr<ControlClient> join(int rank = 0, int size = 1) {
    return ControlClient::connect("127.0.0.1", server_->port(), options_.secret, hello(rank, size),
                                  Clock::now() + seconds(5));
  }

  // The next event, which must come within 10 s.
  ControlEvent next() {
    auto event = server_->next(Clock::now() + seconds(10));
    if (!event) {
      ADD_FAILURE() << "no event";
      return {};
    }
    return *event;
  }

  int raw(const std::string& bytes) const {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(server_->port());
    inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)), 0);
    EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    return fd;
  }

  std::string raw_hello() const {
    json greeting = hello();
    greeting["type"] = "hello";
    greeting["secret"] = options_.secret;
    return frame(greeting.dump());
  }

  // Nothing but an end of the connection comes back.
  static bool closes_silently(int fd) {
    char byte;
    timeval limit{10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const ssize_t got = recv(fd, &byte, 1, 0);
    const bool ended = got == 0 || (got < 0 && errno == ECONNRESET);
    close(fd);
    return ended;
  }

  ControlServerOptions options_;
  std::unique_ptr<ControlServer> server_;
};

TEST_F(ControlTest, WelcomeAndMessagesInOrderBothWays) {
  start();
  const auto client = join();
  EXPECT_EQ(client->welcome()["mode"], "train");
  const ControlEvent joined = next();
  EXPECT_EQ(joined.kind, Kind::kJoined);
  EXPECT_EQ(joined.worker.rank, 0);
  EXPECT_EQ(joined.worker.host, "here");
  EXPECT_EQ(joined.worker.pid, 4711);
  for (int i = 0; i < 300; ++i)
    client->send({{"type", "log"}, {"i", i}, {"pad", std::string(static_cast<std::size_t>(i) * 31, 'x')}});
  for (int i = 0; i < 300; ++i) {
    const ControlEvent event = next();
    ASSERT_EQ(event.kind, Kind::kMessage);
    ASSERT_EQ(event.message["i"], i);
  }
  for (int i = 0; i < 300; ++i) server_->send(0, {{"type", "run_step"}, {"step", i}});
  for (int i = 0; i < 300; ++i) {
    const auto message = client->receive(seconds(10));
    ASSERT_TRUE(message);
    ASSERT_EQ((*message)["step"], i);
  }
  EXPECT_FALSE(client->receive(milliseconds(20)));
  EXPECT_TRUE(client->flush(seconds(1)));
  EXPECT_FALSE(client->lost());
}

TEST_F(ControlTest, LargestMessagePassesAndALargerOneIsRefusedAtTheSender) {
  start();
  const auto client = join();
  next();
  const std::size_t overhead = json({{"type", "log"}, {"t", ""}}).dump().size();
  client->send({{"type", "log"}, {"t", std::string(kMaxMessageBytes - overhead, 'y')}});
  EXPECT_EQ(next().message["t"].get<std::string>().size(), kMaxMessageBytes - overhead);
  EXPECT_THROW(client->send({{"type", "log"}, {"t", std::string(kMaxMessageBytes - overhead + 1, 'y')}}), ControlError);
  client->send({{"type", "log"}, {"t", "still here"}});
  EXPECT_EQ(next().message["t"], "still here");
}

TEST_F(ControlTest, HeartbeatsCarryThePhaseAndKeepAQuietWorker) {
  start(1, 0.5);
  const auto client = join();
  next();
  client->set_phase("pass 2");
  EXPECT_FALSE(server_->next(Clock::now() + milliseconds(1500)));  // three times lost_seconds
  EXPECT_EQ(server_->phase(0), "pass 2");
}

TEST_F(ControlTest, LastWordsBeforeClosingArrive) {
  start();
  for (int round = 0; round < 50; ++round) {
    auto client = join();
    EXPECT_EQ(next().kind, Kind::kJoined);
    server_->send(0, {{"type", "checkpoint"}});  // unread input must not take the last words along
    client->set_phase("end");
    client->send({{"type", "failed"}, {"kind", "input"}, {"message", "why"}});
    client.reset();
    const ControlEvent last = next();
    ASSERT_EQ(last.kind, Kind::kMessage) << round << " " << last.text;
    EXPECT_EQ(last.message["message"], "why");
    const ControlEvent lost = next();
    EXPECT_EQ(lost.kind, Kind::kLost);
    EXPECT_EQ(lost.text, "it closed the connection");
  }
}

TEST_F(ControlTest, SilentWorkerIsLostInTime) {
  start(1, 0.4);
  const int fd = raw(raw_hello());
  EXPECT_EQ(next().kind, Kind::kJoined);
  const auto begin = Clock::now();
  const ControlEvent lost = next();
  EXPECT_EQ(lost.kind, Kind::kLost);
  EXPECT_EQ(lost.text, "nothing heard for 0.4 s");
  EXPECT_TRUE(lost.timed_out);
  EXPECT_GE(Clock::now() - begin, milliseconds(300));
  close(fd);
}

TEST_F(ControlTest, HalfAMessageIsNoSignOfLife) {
  start(1, 0.5);
  const int fd = raw(raw_hello());
  EXPECT_EQ(next().kind, Kind::kJoined);
  std::atomic<bool> stop{false};
  std::thread drip([&] {
    const std::string slow = frame(std::string(1000, ' '));
    for (std::size_t i = 0; i < slow.size() && !stop; ++i) {
      send(fd, slow.data() + i, 1, MSG_NOSIGNAL);
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  const ControlEvent lost = next();
  EXPECT_EQ(lost.kind, Kind::kLost);
  stop = true;
  drip.join();
  close(fd);
}

TEST_F(ControlTest, NonsenseFromAWorkerLosesIt) {
  const std::pair<std::string, std::string> cases[] = {{frame("hello"), "not JSON"},
                                                       {frame("{\"a\":1}"), "without a type"},
                                                       {std::string("\x00\x10\x00\x01", 4), "1048577 bytes"},
                                                       {std::string(4, '\0'), "an empty message"}};
  for (const auto& [bytes, expected] : cases) {
    start();
    const int fd = raw(raw_hello() + bytes);
    EXPECT_EQ(next().kind, Kind::kJoined);
    const ControlEvent lost = next();
    EXPECT_EQ(lost.kind, Kind::kLost);
    EXPECT_NE(lost.text.find(expected), std::string::npos) << lost.text;
    close(fd);
  }
}

TEST_F(ControlTest, StrangersAreRefusedWithoutAnAnswerAndDisturbNobody) {
  start(1, 5, 0.3);
  const auto client = join();
  next();
  json wrong = hello();
  wrong["type"] = "hello";
  wrong["secret"] = make_secret();
  json no_hello = wrong;
  no_hello["type"] = "log";
  no_hello["secret"] = options_.secret;
  json no_secret = hello();
  no_secret["type"] = "hello";
  const std::string cases[] = {frame(wrong.dump()),
                               frame(no_hello.dump()),
                               frame(no_secret.dump()),
                               "GET / HTTP/1.1\r\n\r\n",
                               std::string(4, '\xff'),
                               frame("{"),
                               frame(std::string(kMaxHelloBytes + 1, ' ')),
                               std::string("\0\0", 2),
                               ""};
  for (const std::string& bytes : cases) {
    const int fd = raw(bytes);
    const ControlEvent event = next();
    EXPECT_EQ(event.kind, Kind::kStranger);
    EXPECT_EQ(event.text.find("refused a connection from 127.0.0.1: "), 0u) << event.text;
    EXPECT_EQ(event.text.find(options_.secret), std::string::npos);
    EXPECT_TRUE(closes_silently(fd)) << event.text;
  }
  client->send({{"type", "log"}, {"text", "fine"}});
  EXPECT_EQ(next().message["text"], "fine");
  EXPECT_FALSE(client->lost());
}

TEST_F(ControlTest, FloodOfStrangersLeavesRoomForAWorker) {
  start(1, 5, 0.5);
  std::vector<int> flood;
  for (int i = 0; i < 300; ++i) flood.push_back(raw(""));
  std::this_thread::sleep_for(milliseconds(1200));
  const auto client = join();
  for (;;) {
    const ControlEvent event = next();
    if (event.kind == Kind::kStranger) continue;
    EXPECT_EQ(event.kind, Kind::kJoined);
    break;
  }
  for (int fd : flood) close(fd);
}

// Those that say nothing make room for those that come later, long before hello_seconds have passed.
TEST_F(ControlTest, WorkerJoinsInTheMiddleOfAFlood) {
  start(1, 30, 3600);
  std::vector<int> flood;
  for (int i = 0; i < 200; ++i) flood.push_back(raw(""));
  const auto client = join();
  for (int i = 0; i < 200; ++i) flood.push_back(raw("\x7f"));
  int joined = 0, refused = 0;
  while (joined == 0 || refused < 100) {
    const ControlEvent event = next();
    if (event.kind == Kind::kJoined) ++joined;
    if (event.kind == Kind::kStranger) {
      ++refused;
      EXPECT_NE(event.text.find("too many connections"), std::string::npos) << event.text;
    }
    ASSERT_NE(event.kind, Kind::kLost) << event.text;
    if (HasFailure()) break;
  }
  EXPECT_EQ(joined, 1);
  EXPECT_FALSE(client->lost());
  for (int fd : flood) close(fd);
}

TEST_F(ControlTest, RefusedProcessOfTheLaunchIsToldFromAStranger) {
  start(2);
  json wrong = hello(0, 1);
  wrong["type"] = "hello";
  wrong["secret"] = options_.secret;
  const int own = raw(frame(wrong.dump()));
  EXPECT_TRUE(next().knows_secret);
  close(own);
  wrong["secret"] = make_secret();
  const int stranger = raw(frame(wrong.dump()));
  EXPECT_FALSE(next().knows_secret);
  close(stranger);
}

TEST_F(ControlTest, WrongSecretSizeOrRankIsTold) {
  start(2);
  const auto refusal = [&](const std::string& secret, const json& greeting) {
    try {
      ControlClient::connect("127.0.0.1", server_->port(), secret, greeting, Clock::now() + seconds(5));
    } catch (const ControlError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refusal(make_secret(), hello(0, 2)).find("without a welcome"), std::string::npos);
  EXPECT_NE(refusal(options_.secret, hello(0, 1)).find("srun --mpi=pmix"), std::string::npos);
  EXPECT_NE(refusal(options_.secret, hello(2, 2)).find("there is no rank 2"), std::string::npos);
  EXPECT_NE(refusal(options_.secret, hello(-1, 2)).find("there is no rank -1"), std::string::npos);
  const auto first = join(1, 2);
  EXPECT_NE(refusal(options_.secret, hello(1, 2)).find("rank 1 is connected already"), std::string::npos);
  const auto second = join(0, 2);
  EXPECT_FALSE(first->lost());
  server_->send(0, {{"type", "finish"}});
  EXPECT_TRUE(second->receive(seconds(5)));
  EXPECT_FALSE(first->receive(milliseconds(50)));
}

TEST_F(ControlTest, WorkerNoticesThatTheCoordinatorIsGone) {
  start();
  const auto client = join();
  next();
  std::atomic<int> calls{0};
  client->on_lost([&](const std::string&) { ++calls; });
  server_->send(0, {{"type", "run_step"}, {"step", 1}});
  const auto message = client->receive(seconds(5));
  ASSERT_TRUE(message);
  server_.reset();
  EXPECT_FALSE(client->receive(seconds(5)));
  EXPECT_TRUE(client->lost());
  const auto limit = Clock::now() + seconds(5);
  while (calls == 0 && Clock::now() < limit) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(calls, 1);
  EXPECT_THROW(client->send({{"type", "log"}}), ControlError);
  EXPECT_FALSE(client->flush(milliseconds(100)));
  std::atomic<int> late{0};
  client->on_lost([&](const std::string&) { ++late; });
  EXPECT_EQ(late, 1);
}

TEST_F(ControlTest, ConnectingHasADeadline) {
  // A listener that never answers.
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof(where);
  getsockname(fd, reinterpret_cast<sockaddr*>(&where), &size);
  const auto begin = Clock::now();
  EXPECT_THROW(ControlClient::connect("127.0.0.1", ntohs(where.sin_port), "s", hello(), begin + milliseconds(300)),
               ControlError);
  EXPECT_LT(Clock::now() - begin, seconds(5));
  close(fd);
  EXPECT_THROW(ControlClient::connect("127.0.0.1", ntohs(where.sin_port), "s", hello(), Clock::now() + seconds(5)),
               ControlError);
}

TEST(ControlAddress, EnvironmentIsChecked) {
  const auto set = [](const char* host, const char* port, const char* secret) {
    setenv(kHostVariable, host, 1);
    setenv(kPortVariable, port, 1);
    setenv(kSecretVariable, secret, 1);
  };
  set("127.0.0.1", "123", "abc");
  const ControlAddress address = ControlAddress::from_environment();
  EXPECT_EQ(address.host, "127.0.0.1");
  EXPECT_EQ(address.port, 123);
  EXPECT_EQ(address.secret, "abc");
  for (const char* port : {"0", "65536", "12x", "-1", " 1", ""}) {
    set("127.0.0.1", port, "abc");
    EXPECT_THROW(ControlAddress::from_environment(), ControlError) << port;
  }
  set("127.0.0.1", "123", "");
  EXPECT_THROW(ControlAddress::from_environment(), ControlError);
}

}  // namespace
}  // namespace oomb::comm
