// How the answers of several workers become one, who is too slow, and what a Slurm allocation allows.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "configs/error.h"
#include "coordinator/control/answers.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/straggler_watch.h"
#include "coordinator/launch/slurm_allocation.h"

namespace oomb {
namespace {

using control::merge_answers;
using control::StragglerWatch;
using nlohmann::json;

TEST(MergeAnswers, EveryKeyByItsRule) {
  const std::vector<json> answers = {{{"type", "step_done"},
                                      {"step", 3},
                                      {"loss", 1.5},
                                      {"tokens", 8192},
                                      {"seconds", 2.0},
                                      {"a_bytes", 10},
                                      {"pass1_seconds", 0.5},
                                      {"layers", 4},
                                      {"pages", 7},
                                      {"path", "x"}},
                                     {{"type", "step_done"},
                                      {"step", 3},
                                      {"loss", 1.5},
                                      {"tokens", 8192},
                                      {"seconds", 3.0},
                                      {"a_bytes", 20},
                                      {"pass1_seconds", 0.25},
                                      {"layers", 4},
                                      {"pages", 8},
                                      {"path", ""}},
                                     {{"type", "step_done"},
                                      {"step", 3},
                                      {"loss", 1.5},
                                      {"tokens", 8192},
                                      {"seconds", 1.0},
                                      {"a_bytes", 1},
                                      {"pass1_seconds", 0.75},
                                      {"layers", 4},
                                      {"pages", 9},
                                      {"path", ""}}};
  EXPECT_EQ(merge_answers(answers), (json{{"type", "step_done"},
                                          {"step", 3},
                                          {"loss", 1.5},
                                          {"tokens", 8192},
                                          {"seconds", 3.0},
                                          {"a_bytes", 31},
                                          {"pass1_seconds", 0.75},
                                          {"layers", 4},
                                          {"pages", {7, 8, 9}},
                                          {"path", "x"}}));
  EXPECT_EQ(merge_answers({answers[1]}), answers[1]);
}

TEST(MergeAnswers, LargeSumsStayIntegers) {
  const std::int64_t large = (std::int64_t{1} << 53) + 1;
  EXPECT_EQ(merge_answers({{{"bytes", large}}, {{"bytes", large}}})["bytes"], 2 * large);
}

TEST(MergeAnswers, LossMayDifferInTheLastBitsOnly) {
  EXPECT_EQ(merge_answers({{{"loss", 2.0}}, {{"loss", 2.0 + 1e-9}}})["loss"], 2.0);
  EXPECT_THROW(merge_answers({{{"loss", 2.0}}, {{"loss", 2.001}}}), control::WorkerLost);
  EXPECT_THROW(merge_answers({{{"loss", 2.0}}, {{"loss", nullptr}}}), control::WorkerLost);
  EXPECT_TRUE(merge_answers({{{"loss", nullptr}}, {{"loss", nullptr}}})["loss"].is_null());
}

TEST(MergeAnswers, DisagreementNamesKeyAndRank) {
  const auto text_of = [](const std::vector<json>& answers) {
    try {
      return merge_answers(answers).dump();
    } catch (const control::WorkerLost& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(text_of({{{"tokens", 8192}}, {{"tokens", 8192}}, {{"tokens", 2048}}}),
            "workers disagree: tokens is 8192 on rank 0 and 2048 on rank 2");
  EXPECT_EQ(text_of({{{"step", 1}}, {{"step", 1}, {"tokens", 5}}}),
            "workers disagree: tokens is null on rank 0 and 5 on rank 1");
  EXPECT_EQ(text_of({{{"resumed_step", 4}}, {{"resumed_step", 0}}}),
            "workers disagree: resumed_step is 4 on rank 0 and 0 on rank 1");
  EXPECT_EQ(text_of({{{"seconds", 4}}, {{"seconds", "long"}}}),
            "the worker broke the protocol: seconds of rank 1 is \"long\", not a number");
}

TEST(StragglerWatch, TellsOnceAfterThreeStepsInARow) {
  StragglerWatch watch;
  const std::vector<double> fair = {1.0, 1.1, 0.9, 1.2, 1.0}, slow = {1.0, 1.1, 0.9, 3.0, 1.0};
  EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_TRUE(watch.take(fair).empty());
  EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_EQ(watch.take(slow), std::vector<int>{3});
  EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_TRUE(watch.take(fair).empty());
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(watch.take(slow).empty());
  EXPECT_EQ(watch.take(slow), std::vector<int>{3});
}

TEST(StragglerWatch, OfTwoWorkersTheSlowerOneAndNoNoise) {
  StragglerWatch watch;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(watch.take({4.0, 1.0}).empty());
  EXPECT_EQ(watch.take({4.0, 1.0}), std::vector<int>{0});
  StragglerWatch quick;
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(quick.take({0.001, 0.04, 0.001}).empty());
  StragglerWatch alone;
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(alone.take({5.0}).empty());
}

class SlurmAllocationTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME"}) unsetenv(name);
  }
};

TEST_F(SlurmAllocationTest, ReadsTheEnvironmentAndRefusesNonsense) {
  EXPECT_FALSE(launch::slurm_allocation());
  setenv("SLURM_JOB_ID", "12", 1);
  setenv("SLURM_NTASKS", "4", 1);
  setenv("SLURM_JOB_NUM_NODES", "2", 1);
  setenv("SLURMD_NODENAME", "n1", 1);
  const auto allocation = launch::slurm_allocation();
  ASSERT_TRUE(allocation);
  EXPECT_EQ(allocation->job, "12");
  EXPECT_EQ(allocation->tasks, 4);
  EXPECT_EQ(allocation->nodes, 2);
  EXPECT_TRUE(allocation->on_compute_node);
  setenv("SLURM_NTASKS", "4x", 1);
  EXPECT_THROW(launch::slurm_allocation(), InputError);
}

TEST_F(SlurmAllocationTest, TasksAndWorkersHaveToMatch) {
  launch::SlurmAllocation allocation;
  allocation.job = "12";
  EXPECT_NO_THROW(launch::check_tasks(allocation, 3));  // the job did not say
  allocation.tasks = 4;
  EXPECT_NO_THROW(launch::check_tasks(allocation, 4));
  try {
    launch::check_tasks(allocation, 2);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()),
              "topology.workers: 2, but Slurm job 12 has 4 task(s) (SLURM_NTASKS); allowed: topology.workers=4, or a "
              "job of 2 task(s)");
  }
}

}  // namespace
}  // namespace oomb
