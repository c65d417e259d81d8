#include "coordinator/control/train.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "comm/control_messages.h"
#include "configs/error.h"
#include "coordinator/control/checkpoint_policy.h"
#include "coordinator/control/launch_outcome.h"
#include "coordinator/control/run_error.h"
#include "coordinator/control/stop_signals.h"
#include "coordinator/control/worker_session.h"
#include "coordinator/status/loss_plot.h"
#include "coordinator/status/metrics_file.h"
#include "coordinator/status/reporter.h"
#include "coordinator/status/run_folder.h"

namespace oomb::control {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using nlohmann::ordered_json;
namespace message = comm::message;

std::int64_t last_step_of(const RunConfig& config) {
  const TrainSection& train = config.train;
  return train.stop_after > 0 ? std::min(train.stop_after, train.steps) : train.steps;
}

// Steps of one launch of the workers.
class TrainingLoop {
 public:
  TrainingLoop(const RunConfig& config, WorkerSession& session, status::Reporter& reporter, std::string& checkpoint)
      : config_(config), session_(session), reporter_(reporter), checkpoint_(checkpoint) {}

  void run() {
    const WorkerReady ready = session_.start();
    const std::int64_t last = last_step_of(config_);
    std::string started = "worker " + session_.worker_name() + ": " + ready.device + ", " +
                          status::format_count(static_cast<double>(ready.parameters)) + " parameters";
    if (ready.resumed_step > 0) started += ", going on after step " + std::to_string(ready.resumed_step);
    reporter_.info(started);
    status::MetricsFile metrics(config_.run.dir / "metrics.jsonl", ready.resumed_step + 1);
    CheckpointPolicy policy(config_.checkpoint.every, ready.resumed_step, Clock::now());
    std::int64_t done = ready.resumed_step;
    if (done >= last)
      reporter_.info("nothing to do: step " + std::to_string(done) + " of " + std::to_string(last) + " is done");
    started_ = Clock::now();
    first_step_ = done + 1;
    while (done < last && stop_signal() == 0) {
      run_step(done + 1, last, metrics);
      ++done;
      if (policy.due(done, Clock::now())) make_checkpoint(done, policy);
    }
    if (policy.pending(done)) make_checkpoint(done, policy);
    draw_loss();
    session_.finish();
  }

 private:
  void run_step(std::int64_t step, std::int64_t last, status::MetricsFile& metrics) {
    const json answer = session_.request({{"type", message::kRunStep}, {"step", step}}, message::kStepDone);
    if (integer_of(answer, "step") != step)
      throw WorkerLost("the worker broke the protocol: it did another step than asked");
    const double tokens = static_cast<double>(integer_of(answer, "tokens"));
    const double seconds = number_of(answer, "seconds");
    const double speed = seconds > 0 ? tokens / seconds : 0;
    ordered_json line;
    line["step"] = step;
    line["loss"] = number_of(answer, "loss");
    line["tokens"] = integer_of(answer, "tokens");
    line["tokens_per_second"] = speed;
    line["seconds"] = seconds;
    line["grad_norm"] = number_of(answer, "grad_norm");
    line["lr"] = number_of(answer, "lr");
    line["hbm_peak_bytes"] = integer_of(answer, "hbm_peak_bytes");
    line["host_peak_bytes"] = integer_of(answer, "host_peak_bytes");
    for (const auto& [key, value] : answer.items()) {
      if (key != "type" && !line.contains(key)) line[key] = value;
    }
    show_step(line, step, last, speed);
    const std::int64_t every = config_.eval.every;
    if (every > 0 && (step % every == 0 || step == last) && stop_signal() == 0) add_evaluation(line, step);
    metrics.append(line);
  }

  void draw_loss() const {
    const std::filesystem::path svg = config_.run.dir / "loss.svg";
    const std::string title = config_.run.name + ": loss over steps, nats per token";
    if (!status::write_loss_plot(config_.run.dir / "metrics.jsonl", svg, title)) {
      reporter_.info("no plot of the loss: " + svg.string() + " could not be written");
    }
  }

  void show_step(const ordered_json& line, std::int64_t step, std::int64_t last, double speed) {
    status::StepStatus shown;
    shown.step = step;
    shown.last_step = last;
    shown.loss = line["loss"].get<double>();
    shown.tokens_per_second = speed;
    const double elapsed = std::chrono::duration<double>(Clock::now() - started_).count();
    shown.seconds_left = elapsed / static_cast<double>(step - first_step_ + 1) * static_cast<double>(last - step);
    shown.hbm_peak_bytes = line["hbm_peak_bytes"];
    shown.host_peak_bytes = line["host_peak_bytes"];
    reporter_.step(shown);
  }

  void add_evaluation(ordered_json& line, std::int64_t step) {
    const json answer = session_.request({{"type", message::kEvaluate}}, message::kEvaluated);
    line["eval_loss"] = number_of(answer, "loss");
    line["eval_tokens"] = integer_of(answer, "tokens");
    char text[96];
    std::snprintf(text, sizeof(text), "step %lld: held-out loss %.4f over %lld tokens", static_cast<long long>(step),
                  number_of(answer, "loss"), static_cast<long long>(integer_of(answer, "tokens")));
    reporter_.info(text);
  }

  void make_checkpoint(std::int64_t step, CheckpointPolicy& policy) {
    const json answer = session_.request({{"type", message::kCheckpoint}}, message::kCheckpointDone);
    checkpoint_ = text_of(answer, "path");
    policy.made(step, Clock::now());
    char text[64];
    std::snprintf(text, sizeof(text), " in %.1f s", number_of(answer, "seconds"));
    reporter_.info("checkpoint of step " + std::to_string(step) + ": " + checkpoint_ + ", " +
                   status::format_bytes(integer_of(answer, "bytes")) + text);
  }

  const RunConfig& config_;
  WorkerSession& session_;
  status::Reporter& reporter_;
  std::string& checkpoint_;  // path of the last one made, by this or an earlier launch
  Clock::time_point started_{};
  std::int64_t first_step_ = 1;
};

// One launch. True when it came to its end; false when a worker was lost and may be relaunched.
bool train_once(const RunConfig& config, const std::filesystem::path& worker_program, launch::Launcher& launcher,
                status::Reporter& reporter, std::string& checkpoint, bool may_relaunch) {
  WorkerSession session(config, "train", worker_program, config.run.dir / "worker.log", launcher, reporter);
  try {
    TrainingLoop(config, session, reporter, checkpoint).run();
    return true;
  } catch (const WorkerLost& error) {
    if (may_relaunch && stop_signal() == 0) {
      reporter.error(error.what());
      show_output(launcher, reporter);
      session.end(shutdown_grace(config));
      return false;
    }
    session.end(shutdown_grace(config));
    reporter.error(error.what());
    show_output(launcher, reporter);
    throw WorkerLost("training stopped; what was reached is in " +
                     (checkpoint.empty() ? config.checkpoint.dir.string() + ", if a checkpoint was made" : checkpoint));
  } catch (const StoppedAtOnce&) {
    session.end(std::chrono::milliseconds(stop_at_once() ? 0 : 2000));
    throw;
  } catch (...) {
    session.end(shutdown_grace(config));
    throw;
  }
}

}  // namespace

int train(const RunConfig& config, const std::filesystem::path& worker_program, launch::Launcher& launcher) {
  status::Reporter reporter(stdout, config.log.level, config.log.every);
  return report_failures(reporter, [&] {
    const status::RunFolder folder(config.run.dir);
    status::write_atomically(folder.path() / "config.json", to_json(config) + "\n");
    std::string checkpoint;
    RunConfig attempt = config;
    for (std::int64_t relaunches = 0;; ++relaunches) {
      if (train_once(attempt, worker_program, launcher, reporter, checkpoint, relaunches < config.restart.max)) break;
      // The last checkpoint of this run is known to be whole; what `resume` says is for the first launch.
      if (!checkpoint.empty()) attempt.checkpoint.resume = {Resume::Kind::kPath, checkpoint};
      reporter.warning("relaunch " + std::to_string(relaunches + 1) + " of " + std::to_string(config.restart.max) +
                       (checkpoint.empty() ? ", from the start of this run" : ", from " + checkpoint));
    }
    return stop_signal() == 0 ? static_cast<int>(kSuccess) : 128 + stop_signal();
  });
}

int evaluate(const RunConfig& config, const std::filesystem::path& worker_program, launch::Launcher& launcher,
             bool json_output) {
  status::Reporter reporter(stderr, config.log.level, config.log.every);
  return report_failures(reporter, [&] {
    with_workers(config, "eval", worker_program, launcher, reporter, [&](WorkerSession& session) {
      const auto ready = session.start();
      const json answer = session.request({{"type", message::kEvaluate}}, message::kEvaluated);
      ordered_json result;
      result["loss"] = number_of(answer, "loss");
      result["tokens"] = integer_of(answer, "tokens");
      result["checkpoint"] = ready.checkpoint.empty() ? ordered_json() : ordered_json(ready.checkpoint);
      session.finish();
      if (json_output) {
        std::printf("%s\n", result.dump().c_str());
      } else {
        std::printf("held-out loss %.6f over %lld tokens%s%s\n", result["loss"].get<double>(),
                    static_cast<long long>(integer_of(answer, "tokens")), ready.checkpoint.empty() ? "" : ", ",
                    ready.checkpoint.c_str());
      }
    });
    return std::fflush(stdout) == 0 ? static_cast<int>(kSuccess) : static_cast<int>(kResource);
  });
}

}  // namespace oomb::control
