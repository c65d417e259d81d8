// `oomb train` with several fake workers: answers are merged, failures are named, and the first cause is what is told.
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/coordinator/train_test.h"

namespace oomb::testing {
namespace {

class WorkersTest : public TrainTest {
 protected:
  OombProcess start_workers(int workers, const std::string& behaviour, std::vector<std::string> settings = {}) {
    settings.insert(settings.begin(), {"topology.workers=" + std::to_string(workers), "log.level=debug"});
    return start(behaviour, settings);
  }

  // The process of a rank, from the line that tells its connection; 0 when that has not come.
  static pid_t pid_of(const OombProcess& process, int rank) {
    const std::string out = process.out(), name = "connected: rank " + std::to_string(rank) + " on fakehost (pid ";
    const std::size_t at = out.find(name);
    return at == std::string::npos ? 0 : static_cast<pid_t>(std::stol(out.substr(at + name.size())));
  }

  static bool wait_for_step(OombProcess& process, int step) {
    return process.wait_until([&] { return has(process.out(), "step " + std::to_string(step) + "/"); });
  }
};

class CountTest : public WorkersTest, public ::testing::WithParamInterface<int> {};

TEST_P(CountTest, RunsToTheEndWithSumsMaximaAndTokensCountedOnce) {
  const int workers = GetParam();
  OombProcess process = start_workers(workers, "late#" + std::to_string(workers - 1), {"eval.every=4"});
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(process.err(), "");
  EXPECT_EQ(metric_steps(), steps_to(8));
  const json line = metrics()[3];
  EXPECT_EQ(line["loss"], 0.25);
  EXPECT_EQ(line["tokens"], 4097);
  EXPECT_EQ(line["host_peak_bytes"], workers << 20);
  EXPECT_EQ(line["seconds"], 0.001 + 0.001 * (workers - 1));
  EXPECT_EQ(line["extra"], 7);
  std::vector<int> ranks;
  for (int rank = 0; rank < workers; ++rank) ranks.push_back(rank);
  EXPECT_EQ(line["own"], json(ranks));
  EXPECT_EQ(line["eval_tokens"], 999);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"8"});
  EXPECT_TRUE(has(process.out(), std::to_string(workers) + " workers on fakehost: cpu, 1.23K parameters"))
      << process.out();
  EXPECT_TRUE(has(process.out(), "a line of ready, rank 0")) << process.out();
  EXPECT_FALSE(has(process.out(), "a line of ready, rank 1")) << process.out();
  EXPECT_TRUE(has(process.out(), (run_dir_ / "checkpoints" / "8").string() + ", " +
                                     (workers == 2   ? "2.00"
                                      : workers == 3 ? "3.00"
                                                     : "5.00") +
                                     " KiB"))
      << process.out();
  expect_no_family(process);
}

INSTANTIATE_TEST_SUITE_P(Workers, CountTest, ::testing::Values(2, 3, 5));

TEST_F(WorkersTest, EvalAsksAllAndCountsOnce) {
  ASSERT_EQ(start_workers(3, "").wait(), 0);
  OombProcess process(folder_.path(), {"eval", run_file_.string(), "--json", "--set", "topology.workers=3"}, "");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(json::parse(process.out()),
            (json{{"loss", 2.5}, {"tokens", 999}, {"checkpoint", (run_dir_ / "checkpoints" / "8").string()}}));
}

TEST_F(WorkersTest, KilledWorkerIsNamedAndTheOthersEnd) {
  OombProcess process = start_workers(3, "slow=3600");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "3 workers on"); })) << process.out();
  const pid_t victim = pid_of(process, 1);
  ASSERT_GT(victim, 0);
  kill(victim, SIGKILL);
  EXPECT_EQ(process.wait(seconds(15)), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 1 on fakehost (pid " + std::to_string(victim) + "), last phase \""))
      << process.err();
  expect_no_family(process);
}

TEST_F(WorkersTest, CrashedWorkerIsNamed) {
  OombProcess process = start_workers(5, "crash@3#4,hang@3#0,hang@3#1");
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 4 on fakehost")) << process.err();
  expect_no_family(process);
}

TEST_F(WorkersTest, StoppedWorkerIsNamedInTime) {
  OombProcess process = start_workers(3, "stop@2#2", {"timeouts.lost_seconds=1"});
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 2 on fakehost")) << process.err();
  EXPECT_TRUE(has(process.err(), "last phase \"pass 1\": nothing heard for 1 s")) << process.err();
  expect_no_family(process);
}

// The other ranks notice first, and the launcher ends them all when they give up.
TEST_F(WorkersTest, ConsequencesDoNotHideTheFirstCause) {
  OombProcess process = start_workers(3, "stop@2#1,accuse@2#0,accused=1,hang@2#2", {"timeouts.lost_seconds=1.5"});
  EXPECT_EQ(process.wait(), 1);
  const std::string err = process.err();
  EXPECT_TRUE(has(err, "lost worker rank 1 on fakehost")) << err;
  EXPECT_TRUE(has(err, "rank 0 on fakehost")) << err;
  EXPECT_TRUE(has(err, " says: told to fail: peer")) << err;
  EXPECT_FALSE(has(err, "lost worker rank 0")) << err;
  EXPECT_FALSE(has(err, "lost worker rank 2")) << err;
  expect_no_family(process);
}

// A worker that says itself why it failed is believed, also after it was accused.
TEST_F(WorkersTest, ToldFailureOfTheAccusedIsTheCause) {
  OombProcess process = start_workers(2, "accuse@2#0,accused=1,fail_resource@2#1");
  EXPECT_EQ(process.wait(), 3);
  EXPECT_TRUE(has(process.err(), "told to fail: resource")) << process.err();
  expect_no_family(process);
}

TEST_F(WorkersTest, FailureOfInputOnAllWorkersIsOneLine) {
  OombProcess process = start_workers(3, "fail_input@1", {"restart.max=3"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_EQ(process.err(), "error: told to fail: input\n");
  expect_no_family(process);
}

TEST_F(WorkersTest, WorkersThatDoNotAnswerAreNamed) {
  OombProcess process = start_workers(3, "hang@2#0,hang@2#2", {"timeouts.step_seconds=1"});
  EXPECT_EQ(process.wait(), 1);
  const std::string err = process.err();
  EXPECT_TRUE(has(err, "lost workers rank 0 on fakehost")) << err;
  EXPECT_TRUE(has(err, "; rank 2 on fakehost")) << err;
  EXPECT_FALSE(has(err, "rank 1 on")) << err;
  EXPECT_TRUE(has(err, "no answer to run_step within 1 s")) << err;
  expect_no_family(process);
}

TEST_F(WorkersTest, WorkerThatNeverConnectsIsNamed) {
  OombProcess process = start_workers(3, "no_connect#1", {"timeouts.connect_seconds=2"});
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 1, before it connected: no answer to the launch within 2 s"))
      << process.err();
  expect_no_family(process);
}

TEST_F(WorkersTest, WrongRanksAndSizesAreRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"claim_rank=0#1", "rank 0 is connected already"},
      {"claim_rank=7#1", "there is no rank 7"},
      {"claim_size=1,claim_rank=0", "srun --mpi=pmix"},
  };
  for (const auto& [behaviour, expected] : cases) {
    OombProcess process = start_workers(2, behaviour);
    EXPECT_EQ(process.wait(), 2) << behaviour;
    EXPECT_TRUE(has(process.err(), expected)) << process.err();
    expect_no_family(process);
  }
}

TEST_F(WorkersTest, DisagreementEndsTheRun) {
  OombProcess process = start_workers(3, "disagree@4#2");
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "workers disagree: loss is 0.25 on rank 0 and 0.75 on rank 2")) << process.err();
  EXPECT_EQ(metric_steps(), steps_to(3));
  expect_no_family(process);
}

TEST_F(WorkersTest, SecondAnswerBreaksTheProtocol) {
  OombProcess process = start_workers(2, "twice@2#1,hang@2#0");
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 1 on fakehost")) << process.err();
  EXPECT_TRUE(has(process.err(), "it answered run_step twice")) << process.err();
}

TEST_F(WorkersTest, StragglerIsNamedOnce) {
  OombProcess process = start_workers(3, "compute=0.5#0,compute=0.6#1,compute=1.9#2");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_TRUE(has(process.err(), "warning: slow worker rank 2 on fakehost (pid ")) << process.err();
  EXPECT_TRUE(has(process.err(), "3 steps in a row, the last one (3) 1.90 s where half of the workers need 0.60 s"))
      << process.err();
  EXPECT_EQ(lines_of(process.err()), 1) << process.err();
  EXPECT_EQ(metrics()[0]["compute_seconds"], 1.9);
}

TEST_F(WorkersTest, RelaunchesAllFromTheLastCheckpoint) {
  OombProcess process = start_workers(3, "crash@5#1,once", {"restart.max=1", "checkpoint.every=2"});
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_TRUE(has(process.err(), "lost worker rank 1 on fakehost")) << process.err();
  EXPECT_TRUE(has(process.err(), "relaunch 1 of 1, from " + (run_dir_ / "checkpoints" / "4").string()))
      << process.err();
  EXPECT_EQ(metric_steps(), steps_to(8));
  expect_no_family(process);
}

TEST_F(WorkersTest, SignalEndsWithACheckpoint) {
  OombProcess process = start_workers(2, "slow=0.2", {"train.steps=1000"});
  ASSERT_TRUE(wait_for_step(process, 2)) << process.out() << process.err();
  process.signal(SIGUSR1);
  EXPECT_EQ(process.wait(), 128 + SIGUSR1) << process.err();
  EXPECT_EQ(checkpoints(), std::set<std::string>{std::to_string(metric_steps().size())});
  expect_no_family(process);
}

TEST_F(WorkersTest, WorkerThatDoesNotEndIsNamed) {
  OombProcess process = start_workers(2, "no_finish#1", {"timeouts.shutdown_seconds=1"});
  EXPECT_EQ(process.wait(), 1);
  EXPECT_TRUE(has(process.err(), "worker rank 1 on fakehost")) << process.err();
  EXPECT_TRUE(has(process.err(), "did not end within timeouts.shutdown_seconds (1 s)")) << process.err();
  expect_no_family(process);
}

}  // namespace
}  // namespace oomb::testing
