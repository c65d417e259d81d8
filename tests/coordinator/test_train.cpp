// `oomb train` and `oomb eval` against a fake worker: the protocol, the files, every way a run can end.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <set>

#include "tests/coordinator/train_test.h"

namespace oomb::testing {
namespace {

TEST_F(TrainTest, RunsToTheEnd) {
  OombProcess process = start("");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(metric_steps(), steps_to(8));
  const json line = metrics()[3];
  EXPECT_EQ(line["loss"], 0.25);
  EXPECT_EQ(line["tokens"], 4097);
  EXPECT_EQ(line["seconds"], 0.001);
  EXPECT_NEAR(line["tokens_per_second"].get<double>(), 4097e3, 1);
  EXPECT_EQ(line["grad_norm"], 0.5);
  EXPECT_EQ(line["lr"], 1e-3);
  EXPECT_EQ(line["hbm_peak_bytes"], 0);
  EXPECT_EQ(line["host_peak_bytes"], 1 << 20);
  EXPECT_EQ(line["extra"], 7);
  EXPECT_FALSE(line.contains("type"));
  EXPECT_EQ(checkpoints(), std::set<std::string>{"8"});
  EXPECT_TRUE(has(process.out(), "step 8/8")) << process.out();
  EXPECT_TRUE(has(process.out(), "a line of the worker")) << process.out();
  EXPECT_TRUE(has(process.out(), "a line of ready")) << process.out();
  EXPECT_EQ(process.err(), "");
  EXPECT_EQ(process.out().find('\r'), std::string::npos);
  expect_no_family(process);
}

TEST_F(TrainTest, ConfigFileIsWhatTheConfigCommandPrints) {
  ASSERT_EQ(start("", {"train.steps=2"}).wait(), 0);
  OombProcess shown(folder_.path(), {"config", run_file_.string(), "--set", "train.steps=2"}, "");
  ASSERT_EQ(shown.wait(), 0);
  EXPECT_EQ(shown.out(), read_file(run_dir_ / "config.json"));
  EXPECT_EQ(json::parse(shown.out())["train"]["steps"], 2);
}

TEST_F(TrainTest, StopAfterEndsWithACheckpointAndTheNextRunGoesOn) {
  ASSERT_EQ(start("", {"train.stop_after=5"}).wait(), 0);
  EXPECT_EQ(metric_steps(), steps_to(5));
  EXPECT_EQ(checkpoints(), std::set<std::string>{"5"});
  OombProcess second = start("");
  ASSERT_EQ(second.wait(), 0);
  EXPECT_EQ(metric_steps(), steps_to(8));
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"5", "8"}));
  EXPECT_TRUE(has(second.out(), "going on after step 5")) << second.out();
  OombProcess third = start("");
  ASSERT_EQ(third.wait(), 0);
  EXPECT_TRUE(has(third.out(), "nothing to do")) << third.out();
  EXPECT_EQ(metric_steps(), steps_to(8));
}

TEST_F(TrainTest, CheckpointsEverySoManySteps) {
  ASSERT_EQ(start("", {"checkpoint.every=3"}).wait(), 0);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"3", "6", "8"}));
}

TEST_F(TrainTest, CheckpointsByTime) {
  ASSERT_EQ(start("slow=0.1", {"checkpoint.every=0.25s"}).wait(), 0);
  const auto made = checkpoints();
  EXPECT_TRUE(made.contains("8"));
  EXPECT_GE(made.size(), 2u);  // 0.8 s of steps
  EXPECT_LE(made.size(), 4u);
}

TEST_F(TrainTest, EvaluatesDuringTraining) {
  ASSERT_EQ(start("", {"eval.every=3"}).wait(), 0);
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 8u);
  for (const json& line : lines) {
    const std::int64_t step = line["step"];
    const bool evaluated = step % 3 == 0 || step == 8;
    EXPECT_EQ(line.contains("eval_loss"), evaluated) << step;
    if (evaluated) {
      EXPECT_EQ(line["eval_loss"], 2.5);
    }
  }
}

TEST_F(TrainTest, LossThatIsNoNumberIsNullInMetrics) {
  OombProcess process = start("nan");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_TRUE(metrics()[0]["loss"].is_null());
  EXPECT_TRUE(has(process.out(), "loss nan")) << process.out();
}

TEST_F(TrainTest, ShowsOneRewrittenLineOnATerminal) {
  OombProcess process = start("", {}, true);
  ASSERT_EQ(process.wait(), 0) << process.err();
  const std::string text = process.out();
  EXPECT_TRUE(has(text, "\r\033[Kstep 8/8")) << text;
}

// --- stopping ------------------------------------------------------------------------------------------------------

class StopTest : public TrainTest, public ::testing::WithParamInterface<int> {};

TEST_P(StopTest, SignalEndsAfterTheStepWithACheckpoint) {
  OombProcess process = start("slow=0.2", {"train.steps=1000"});
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "step 2/"); })) << process.out() << process.err();
  process.signal(GetParam());
  EXPECT_EQ(process.wait(), 128 + GetParam()) << process.err();
  const auto steps = metric_steps();
  EXPECT_EQ(steps, steps_to(static_cast<std::int64_t>(steps.size())));
  EXPECT_EQ(checkpoints(), std::set<std::string>{std::to_string(steps.size())});
  EXPECT_LT(steps.size(), 10u);
  expect_no_family(process);
}

INSTANTIATE_TEST_SUITE_P(Signals, StopTest, ::testing::Values(SIGINT, SIGTERM, SIGUSR1, SIGHUP));

TEST_F(TrainTest, SecondCtrlCEndsAtOnce) {
  OombProcess process = start("slow=3600");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "cpu, 1.23K parameters"); })) << process.out();
  process.signal(SIGINT);
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "once more to end at once"); })) << process.out();
  EXPECT_TRUE(process.running());
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(seconds(5)), 130);
  expect_no_family(process);
}

TEST_F(TrainTest, StepThatOutlastsTheStopDeadlineIsGivenUp) {
  OombProcess process = start("slow=3600", {"timeouts.stop_seconds=0.5"});
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "cpu, 1.23K parameters"); }));
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(seconds(10)), 143);
  EXPECT_TRUE(has(process.err(), "timeouts.stop_seconds")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, SignalBeforeTheFirstStepEndsTheLaunch) {
  OombProcess process = start("no_ready");
  ASSERT_TRUE(process.wait_until([&] { return process.family().size() >= 2; }));
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(seconds(10)), 130) << process.err();
  expect_no_family(process);
}

// --- lost workers --------------------------------------------------------------------------------------------------

TEST_F(TrainTest, CrashedWorkerIsNamed) {
  OombProcess process = start("crash@3");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(process.wait(seconds(15)), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(12));
  const std::string err = process.err();
  EXPECT_TRUE(has(err, "lost worker rank 0 on fakehost (pid ")) << err;
  EXPECT_TRUE(has(err, "last phase \"pass 1\"")) << err;
  EXPECT_TRUE(has(err, "signal 6")) << err;
  EXPECT_TRUE(has(err, "about to abort")) << err;
  EXPECT_EQ(metric_steps(), steps_to(2));
  EXPECT_TRUE(has(read_file(run_dir_ / "worker.log"), "about to abort"));
  expect_no_family(process);
}

TEST_F(TrainTest, KilledWorkerIsNamed) {
  OombProcess process = start("slow=3600");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "(pid "); })) << process.out();
  const std::string out = process.out();
  const pid_t worker = static_cast<pid_t>(std::stol(out.substr(out.find("(pid ") + 5)));
  kill(worker, SIGKILL);
  EXPECT_EQ(process.wait(seconds(10)), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 0 on fakehost (pid " + std::to_string(worker) + ")"))
      << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, StoppedWorkerIsNamedAndKilled) {
  OombProcess process = start("stop@2", {"timeouts.lost_seconds=1"});
  EXPECT_EQ(process.wait(seconds(20)), 1);
  const std::string err = process.err();
  EXPECT_TRUE(has(err, "last phase \"pass 1\": nothing heard for 1 s")) << err;
  expect_no_family(process);
}

TEST_F(TrainTest, WorkerThatNeverAnswersMeetsTheStepDeadline) {
  OombProcess process = start("hang@2", {"timeouts.step_seconds=1"});
  EXPECT_EQ(process.wait(seconds(20)), 1);
  EXPECT_TRUE(has(process.err(), "no answer to run_step within 1 s")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, KilledLauncherTakesEverythingWithIt) {
  OombProcess process = start("slow=3600,keep_orphan");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "(pid "); })) << process.out();
  pid_t launcher = -1;
  for (pid_t pid : process.family()) {
    if (has(read_file("/proc/" + std::to_string(pid) + "/cmdline"), "mpirun")) launcher = pid;
  }
  ASSERT_GT(launcher, 0);
  kill(launcher, SIGKILL);
  EXPECT_EQ(process.wait(seconds(15)), 1);
  EXPECT_TRUE(has(process.err(), "lost worker rank 0")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, KilledCoordinatorTakesEverythingWithIt) {
  OombProcess process = start("slow=3600");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "(pid "); })) << process.out();
  EXPECT_GE(process.family().size(), 2u);
  process.signal(SIGKILL);
  EXPECT_EQ(process.wait(seconds(5)), 128 + SIGKILL);
  EXPECT_TRUE(process.wait_until([&] { return process.family().empty(); }, seconds(10)));
}

struct BadAnswer {
  const char* behaviour;
  const char* expected;
};

void PrintTo(const BadAnswer& answer, std::ostream* out) { *out << answer.behaviour; }

class BadAnswerTest : public TrainTest, public ::testing::WithParamInterface<BadAnswer> {};

TEST_P(BadAnswerTest, EndsTheRunWithItsReason) {
  OombProcess process = start(GetParam().behaviour);
  EXPECT_EQ(process.wait(seconds(20)), 1);
  EXPECT_TRUE(has(process.err(), GetParam().expected)) << process.err();
  expect_no_family(process);
}

INSTANTIATE_TEST_SUITE_P(Answers, BadAnswerTest,
                         ::testing::Values(BadAnswer{"garbage@2", "not JSON"},
                                           BadAnswer{"oversized@2", "at most 1048576"},
                                           BadAnswer{"wrong@2", "\"evaluated\" in answer to run_step"},
                                           BadAnswer{"badstep@2", "step_done without a valid"},
                                           BadAnswer{"exit@2", "status 6"}, BadAnswer{"bad_end", "status 4"},
                                           BadAnswer{"no_finish", "did not end within timeouts.shutdown_seconds"},
                                           BadAnswer{"silent_exit", "libsomething.so.7"}));

TEST_F(TrainTest, WorkerThatNeverConnects) {
  OombProcess process = start("no_connect", {"timeouts.connect_seconds=1.5"});
  EXPECT_EQ(process.wait(seconds(15)), 1);
  EXPECT_TRUE(has(process.err(), "before it connected: no answer to the launch within 1.5 s")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, WorkerThatIsNeverReady) {
  OombProcess process = start("no_ready", {"timeouts.start_seconds=1"});
  EXPECT_EQ(process.wait(seconds(15)), 1);
  EXPECT_TRUE(has(process.err(), "no answer to the start within 1 s")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, ToldFailuresAreOneLineWithTheirStatus) {
  const std::pair<const char*, int> kinds[] = {{"input", 2}, {"resource", 3}};
  for (const auto& [kind, status] : kinds) {
    OombProcess process = start(std::string("fail_") + kind + "@1", {"restart.max=3"});
    EXPECT_EQ(process.wait(seconds(10)), status);
    EXPECT_EQ(process.err(), std::string("error: told to fail: ") + kind + "\n");
    expect_no_family(process);
  }
  OombProcess internal = start("fail_internal@1");
  EXPECT_EQ(internal.wait(seconds(10)), 1);
  EXPECT_TRUE(has(internal.err(), "failed: told to fail: internal")) << internal.err();
}

TEST_F(TrainTest, RelaunchesFromTheLastCheckpoint) {
  OombProcess process = start("crash@5,once", {"restart.max=1", "checkpoint.every=2"});
  ASSERT_EQ(process.wait(seconds(20)), 0) << process.err();
  EXPECT_TRUE(has(process.err(), "relaunch 1 of 1, from " + (run_dir_ / "checkpoints" / "4").string()))
      << process.err();
  EXPECT_EQ(metric_steps(), steps_to(8));
  expect_no_family(process);
}

TEST_F(TrainTest, RelaunchWithResumeNeverKeepsThisRunsCheckpointsOnly) {
  fs::create_directories(run_dir_ / "checkpoints");
  write_file(run_dir_ / "checkpoints" / "7", "of an older run");
  OombProcess process = start("crash@5,once", {"restart.max=1", "checkpoint.every=2", "checkpoint.resume=never"});
  ASSERT_EQ(process.wait(seconds(20)), 0) << process.err();
  EXPECT_TRUE(has(process.out(), "going on after step 4")) << process.out();
  EXPECT_EQ(metric_steps(), steps_to(8));
}

TEST_F(TrainTest, RelaunchesAreBounded) {
  OombProcess process = start("crash@1", {"restart.max=2"});
  EXPECT_EQ(process.wait(seconds(25)), 1);
  EXPECT_TRUE(has(process.err(), "relaunch 2 of 2")) << process.err();
  EXPECT_FALSE(has(process.err(), "relaunch 3")) << process.err();
  expect_no_family(process);
}

TEST_F(TrainTest, StepsBeyondTheCheckpointAreDroppedFromMetricsOnResume) {
  OombProcess crashed = start("crash@6", {"checkpoint.every=4"});
  EXPECT_EQ(crashed.wait(seconds(15)), 1);
  EXPECT_EQ(metric_steps(), steps_to(5));
  std::ofstream(run_dir_ / "metrics.jsonl", std::ios::app) << "{\"step\": 6, \"lo";  // as a crash may leave it
  OombProcess resumed = start("");
  ASSERT_EQ(resumed.wait(), 0) << resumed.err();
  EXPECT_EQ(metric_steps(), steps_to(8));
}

// --- folders and strangers -----------------------------------------------------------------------------------------

TEST_F(TrainTest, StrangersDoNotDisturbTheRun) {
  OombProcess process = start("strangers");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_TRUE(has(process.err(), "refused a connection from 127.0.0.1")) << process.err();
  EXPECT_EQ(metric_steps(), steps_to(8));
}

TEST_F(TrainTest, SecretIsInNoArgumentAndNoFile) {
  OombProcess process = start("slow=3600");
  ASSERT_TRUE(process.wait_until([&] { return has(process.out(), "(pid "); })) << process.out();
  std::string secret;
  for (pid_t pid : process.family()) {
    const std::string environment = read_file("/proc/" + std::to_string(pid) + "/environ");
    const std::string name = "OOMB_CONTROL_SECRET=";
    const std::size_t at = environment.find(name);
    if (at != std::string::npos) secret = environment.c_str() + at + name.size();
  }
  ASSERT_EQ(secret.size(), 64u);
  for (pid_t pid : process.family()) {
    EXPECT_FALSE(has(read_file("/proc/" + std::to_string(pid) + "/cmdline"), secret));
  }
  EXPECT_FALSE(has(read_file("/proc/" + std::to_string(process.pid()) + "/cmdline"), secret));
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
    if (!entry.is_regular_file()) continue;
    EXPECT_FALSE(has(read_file(entry.path()), secret)) << entry.path();
  }
  process.signal(SIGINT);
  process.signal(SIGINT);
}

TEST_F(TrainTest, FullDiskIsOneLine) {
  fs::create_directories(run_dir_ / "checkpoints");
  write_file(run_dir_ / "checkpoints" / "3", "of an earlier run");
  fs::create_symlink("/dev/full", run_dir_ / "metrics.jsonl");
  OombProcess process = start("");
  EXPECT_EQ(process.wait(), 3);
  EXPECT_EQ(process.err(),
            "error: " + (run_dir_ / "metrics.jsonl").string() + ": cannot be written: No space left on device\n");
  EXPECT_EQ(checkpoints(), std::set<std::string>{"3"});
  expect_no_family(process);
}

TEST_F(TrainTest, RunFolderThatCannotBeMadeOrWrittenIsOneLine) {
  write_file(folder_.path() / "file", "");
  for (const char* dir : {"run.dir=file", "run.dir=file/below", "run.dir=/proc/none", "run.dir=/proc"}) {
    OombProcess process = start("", {dir});
    EXPECT_EQ(process.wait(), 2) << dir;
    EXPECT_TRUE(process.err().starts_with("error: run.dir: ")) << process.err();
    EXPECT_EQ(lines_of(process.err()), 1) << process.err();
  }
}

TEST_F(TrainTest, OneCoordinatorPerRunFolder) {
  OombProcess first = start("slow=3600");
  ASSERT_TRUE(first.wait_until([&] { return has(first.out(), "(pid "); })) << first.out();
  TemporaryFolder elsewhere;
  OombProcess second(elsewhere.path(), {"train", run_file_.string()}, "");
  EXPECT_EQ(second.wait(), 2);
  EXPECT_TRUE(has(second.err(), "in use by another run")) << second.err();
}

// --- eval and the command line -------------------------------------------------------------------------------------

TEST_F(TrainTest, EvalPrintsOneJsonLine) {
  ASSERT_EQ(start("").wait(), 0);
  OombProcess process(folder_.path(), {"eval", run_file_.string(), "--json"}, "");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(lines_of(process.out()), 1) << process.out();
  const json result = json::parse(process.out());
  EXPECT_EQ(result, (json{{"loss", 2.5}, {"tokens", 999}, {"checkpoint", (run_dir_ / "checkpoints" / "8").string()}}));
  expect_no_family(process);
}

TEST_F(TrainTest, EvalWithoutACheckpointSaysSo) {
  OombProcess process(folder_.path(), {"eval", run_file_.string(), "--json"}, "");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_TRUE(json::parse(process.out())["checkpoint"].is_null());
  EXPECT_FALSE(fs::exists(run_dir_));
}

TEST_F(TrainTest, CommandLineErrorsAreBadInput) {
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"dance"},
      {"train"},
      {"train", (folder_.path() / "missing.yaml").string()},
      {"train", folder_.path().string()},
      {"train", run_file_.string(), "--set", "train.steps=0"},
      {"train", run_file_.string(), "--set", "train.steps"},
      {"train", run_file_.string(), "extra"},
      {"config"},
      {"eval", run_file_.string(), "--jsn"},
  };
  for (const auto& arguments : wrong) {
    OombProcess process(folder_.path(), arguments, "");
    EXPECT_EQ(process.wait(), 2) << (arguments.empty() ? "" : arguments.back());
    EXPECT_NE(process.err(), "");
    EXPECT_EQ(process.out(), "");
  }
}

TEST_F(TrainTest, VersionAndHelp) {
  OombProcess version(folder_.path(), {"--version"}, "");
  EXPECT_EQ(version.wait(), 0);
  EXPECT_TRUE(version.out().starts_with("oomb ")) << version.out();
  OombProcess help(folder_.path(), {"train", "--help"}, "");
  EXPECT_EQ(help.wait(), 0);
  EXPECT_TRUE(has(help.out(), "--set")) << help.out();
}

TEST_F(TrainTest, ListsCanBeOverridden) {
  OombProcess process(folder_.path(),
                      {"config", run_file_.string(), "--set", "data.extensions=[.h, \"\"]", "--set", "train.steps=3"},
                      "");
  ASSERT_EQ(process.wait(), 0) << process.err();
  EXPECT_EQ(json::parse(process.out())["data"]["extensions"], (json{".h", ""}));
  EXPECT_EQ(json::parse(process.out())["train"]["steps"], 3);
}

TEST_F(TrainTest, MissingWorkerOrLauncherIsBadInput) {
  OombProcess worker(folder_.path(), {"train", run_file_.string()}, "", {{"OOMB_WORKER", "/nowhere/oomb-worker"}});
  EXPECT_EQ(worker.wait(), 2);
  EXPECT_EQ(lines_of(worker.err()), 1) << worker.err();
  OombProcess launcher(folder_.path(), {"train", run_file_.string()}, "", {{"PATH", "/nowhere"}});
  EXPECT_EQ(launcher.wait(), 2);
  EXPECT_TRUE(has(launcher.err(), "mpirun: not found in PATH")) << launcher.err();
}

}  // namespace
}  // namespace oomb::testing
