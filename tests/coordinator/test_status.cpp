// `oomb status` reads a run from its folder, and /metrics answers while it runs.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>

#include "tests/coordinator/train_test.h"

namespace oomb::testing {
namespace {

class StatusTest : public TrainTest {
 protected:
  json status() {
    TemporaryFolder elsewhere;
    OombProcess process(elsewhere.path(), {"status", run_file_.string(), "--json"}, "");
    EXPECT_EQ(process.wait(), 0) << process.err();
    EXPECT_EQ(lines_of(process.out()), 1) << process.out();
    return json::parse(process.out());
  }

  // A socket bound to a port of loopback that was free.
  struct Bound {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in where{};
    Bound() {
      where.sin_family = AF_INET;
      inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
      socklen_t size = sizeof(where);
      EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)), 0);
      EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&where), &size), 0);
    }
    ~Bound() { close(fd); }
    std::string port() const { return std::to_string(ntohs(where.sin_port)); }
  };

  static std::string get_metrics(const sockaddr_in& where) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval limit{5, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    std::string answer;
    const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
    if (connect(fd, reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 &&
        send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;)
        answer.append(buffer, static_cast<std::size_t>(got));
    }
    close(fd);
    return answer;
  }
};

TEST_F(StatusTest, RunThatHasNotStarted) {
  const json found = status();
  EXPECT_EQ(found["running"], false);
  EXPECT_EQ(found["step"], 0);
  EXPECT_EQ(found["last_step"], 8);
  EXPECT_TRUE(found["loss"].is_null());
  EXPECT_TRUE(found["checkpoint"].is_null());
  EXPECT_FALSE(fs::exists(run_dir_));
}

TEST_F(StatusTest, FollowsARunningRunAndSeesItsEnd) {
  OombProcess process = start("slow=0.2", {"train.steps=1000"});
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "step 3/"); })) << process.err();
  const json running = status();
  EXPECT_EQ(running["running"], true);
  EXPECT_GE(running["step"], 3);
  EXPECT_EQ(running["last_step"], 1000);  // as it was started, not as the file says
  EXPECT_NEAR(running["tokens_per_second"].get<double>(), 4097 / 0.2, 1);
  EXPECT_NEAR(running["seconds_left"].get<double>(), 0.2 * (1000 - running["step"].get<double>()), 1e-6);
  process.signal(SIGUSR1);
  ASSERT_EQ(process.wait(), 128 + SIGUSR1);
  fs::create_directories(run_dir_ / "checkpoints" / "step-00000012");  // no marker
  fs::create_directories(run_dir_ / "checkpoints" / "step-00000002");
  write_file(run_dir_ / "checkpoints" / "step-00000002" / "DONE", "");
  std::ofstream(run_dir_ / "metrics.jsonl", std::ios::app) << "{\"step\": 900, \"lo";  // being written
  const json ended = status();
  EXPECT_EQ(ended["running"], false);
  EXPECT_LT(ended["step"], 900);
  EXPECT_EQ(ended["checkpoint_step"], 2);
  EXPECT_EQ(ended["checkpoint"], (run_dir_ / "checkpoints" / "step-00000002").string());
}

TEST_F(StatusTest, WordsAreOneLine) {
  ASSERT_EQ(start("").wait(), 0);
  TemporaryFolder elsewhere;
  OombProcess process(elsewhere.path(), {"status", run_file_.string()}, "");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(process.out(), "run: not running, step 8/8, loss 0.125, 4.10M tok/s; last checkpoint: none\n");
}

TEST_F(StatusTest, AsIfAskedWhileStartingNobodyIsKeptOut) {
  OombProcess process = start("slow=0.05");
  while (process.running()) status();
  EXPECT_EQ(process.wait(), 0) << process.err();
}

#ifdef OOMB_HAVE_PROMETHEUS
TEST_F(StatusTest, MetricsAreServedOnLoopback) {
  sockaddr_in where{};
  std::string port;
  {
    const Bound free_one;
    where = free_one.where;
    port = free_one.port();
  }
  OombProcess process = start("slow=0.2", {"train.steps=1000", "checkpoint.every=2", "status.port=" + port});
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "step 4/"); })) << process.err();
  std::string answer;
  // The step is told to the screen first.
  ASSERT_TRUE(process.wait_until([&] {
    answer = get_metrics(where);
    return has(answer, "oomb_checkpoint_step{run=\"run\"} 4");
  })) << answer;
  EXPECT_TRUE(has(answer, "200 OK")) << answer;
  EXPECT_TRUE(has(answer, "\noomb_step{run=\"run\"} ")) << answer;
  EXPECT_TRUE(has(answer, "\noomb_last_step{run=\"run\"} 1000")) << answer;
  EXPECT_TRUE(has(answer, "\noomb_workers{run=\"run\"} 1")) << answer;
  EXPECT_TRUE(has(answer, "\noomb_tokens_total{run=\"run\"} ")) << answer;
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(), 130);
  expect_no_family(process);
}

TEST_F(StatusTest, TakenPortIsBadInput) {
  const Bound taken;
  ASSERT_EQ(listen(taken.fd, 1), 0);
  OombProcess process = start("", {"status.port=" + taken.port()});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_TRUE(process.err().starts_with("error: status.port: cannot listen on 127.0.0.1:" + taken.port()))
      << process.err();
  EXPECT_EQ(lines_of(process.err()), 1) << process.err();
}
#else
TEST_F(StatusTest, PortWithoutPrometheusIsBadInput) {
  OombProcess process = start("", {"status.port=9100"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_TRUE(has(process.err(), "built without prometheus-cpp; allowed: 0")) << process.err();
}
#endif

}  // namespace
}  // namespace oomb::testing
