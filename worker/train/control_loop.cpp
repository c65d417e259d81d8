#include "worker/train/control_loop.h"

#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <new>
#include <nlohmann/json.hpp>
#include <string>

#include "comm/control_client.h"
#include "comm/control_messages.h"
#include "comm/errors.h"
#include "configs/error.h"
#include "worker/bench/bench_server.h"
#include "worker/train/step_message.h"
#include "worker/train/trainer.h"

namespace oomb {

namespace {

using nlohmann::json;
namespace message = comm::message;
using std::chrono::milliseconds;

constexpr auto kConnectTime = std::chrono::seconds(60);
constexpr auto kPoll = milliseconds(500);
constexpr auto kFlushTime = milliseconds(5000);

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

// A checkpoint that cannot be written: not a setting, but what the machine has left.
class StorageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Server {
 public:
  Server(comm::ControlClient& client, const cluster::Connect& connect) : client_(client), connect_(connect) {}

  /// What the worker was doing last, for messages.
  const std::string& phase() const { return phase_; }

  void run() {
    const json& welcome = client_.welcome();
    const RunConfig config = run_config_from_json(welcome.at("config").dump());
    const bool train = welcome.at("mode") == "train";
    if (welcome.at("mode") == "bench" && config.topology.workers > 1) {
      throw InputError("topology.workers: a bench measures one worker, not " + std::to_string(config.topology.workers) +
                       "; allowed: 1");
    }
    TrainerEvents events;
    events.log = [this](const std::string& level, const std::string& text) {
      client_.send({{"type", message::kLog}, {"level", level}, {"text", text}});
    };
    events.phase = [this](const std::string& text) {
      phase_ = text;
      client_.set_phase(text);
    };
    if (welcome.at("mode") == "bench") return run_bench(config, events);
    events.phase("connecting to the other workers");
    Trainer trainer(config, train ? Trainer::Mode::train : Trainer::Mode::evaluate, events, connect_(config));
    client_.send({{"type", message::kReady},
                  {"device", trainer.types().device.str()},
                  {"parameters", trainer.parameters().num_elements()},
                  {"resumed_step", trainer.steps_done()},
                  {"checkpoint", trainer.resumed_from()},
                  {"lines", trainer.summary()}});
    try {
      serve([&](const json& request) { answer(trainer, request); });
    } catch (...) {
      trainer.abandon("this worker failed");  // its end need not wait for the others
      throw;
    }
  }

 private:
  void run_bench(const RunConfig& config, const TrainerEvents& events) {
    bench::BenchServer server(config, events);
    client_.send({{"type", message::kReady},
                  {"device", server.device()},
                  {"parameters", server.num_parameters()},
                  {"resumed_step", 0},
                  {"checkpoint", ""},
                  {"lines", json::array()}});
    serve([&](const json& request) {
      if (request.at("type") != message::kBench) throw std::runtime_error("only bench requests in mode bench");
      json done = server.answer(request);
      done["type"] = message::kBenchDone;
      client_.send(done);
    });
  }

  void serve(const std::function<void(const json& request)>& answer_to) {
    client_.set_phase("waiting for the coordinator");
    while (!client_.lost()) {
      const auto request = client_.receive(kPoll);
      if (!request) continue;
      if (request->at("type") == message::kFinish) return;
      answer_to(*request);
      client_.set_phase("waiting for the coordinator");
    }
    throw comm::ControlError("the coordinator is gone");
  }

  void answer(Trainer& trainer, const json& request) {
    const std::string type = request.at("type");
    if (type == message::kRunStep) {
      client_.send(step_message(run_step(trainer, request.at("step"))));
    } else if (type == message::kCheckpoint) {
      const auto start = std::chrono::steady_clock::now();
      const checkpoint::CheckpointInfo info = save_checkpoint(trainer);
      int64_t bytes = 0;
      for (const auto& file : info.manifest.files) bytes += file.size;
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      client_.send({{"type", message::kCheckpointDone}, {"path", info.path}, {"bytes", bytes}, {"seconds", seconds}});
    } else if (type == message::kEvaluate) {
      const EvalReport report = trainer.evaluate();
      client_.send({{"type", message::kEvaluated}, {"loss", report.loss}, {"tokens", report.labels}});
    } else {
      throw std::runtime_error("the coordinator sent an unknown request: " + type);
    }
  }

  static StepReport run_step(Trainer& trainer, int64_t step) {
    try {
      return trainer.run_step(step);
    } catch (const InputError& error) {
      throw InputError(std::string(error.what()) + "; " + trainer.keep_last_good_step());
    }
  }

  static checkpoint::CheckpointInfo save_checkpoint(Trainer& trainer) {
    trainer.check_finite();
    try {
      return trainer.save_checkpoint();
    } catch (const InputError& error) {
      throw StorageError(error.what());
    }
  }

  comm::ControlClient& client_;
  const cluster::Connect& connect_;
  std::string phase_ = "starting";
};

int fail(comm::ControlClient& client, const char* kind, const std::string& text, int status,
         const json& further = json::object()) {
  std::cerr << "oomb-worker: " << text << std::endl;
  try {
    json failed = {{"type", message::kFailed}, {"kind", kind}, {"message", text}};
    failed.update(further);
    client.send(failed);
    client.flush(kFlushTime);
  } catch (const comm::ControlError&) {
    // The line above is all that is left to say.
  }
  return status;
}

// LibTorch's messages carry a stack trace after the first line.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// What the allocator wanted and what there is; its advice is about settings that are not ours.
std::string without_advice(const std::string& text) { return text.substr(0, text.find(" Of the allocated memory")); }

}  // namespace

int serve_coordinator(int rank, int size, const cluster::Connect& connect) {
  const auto client = comm::ControlClient::connect(
      comm::ControlAddress::from_environment(),
      {{"rank", rank}, {"size", size}, {"host", host_name()}, {"pid", static_cast<int64_t>(getpid())}},
      std::chrono::steady_clock::now() + kConnectTime);
  client->on_lost([](const std::string& reason) {
    std::cerr << "oomb-worker: " << reason << "; ending" << std::endl;
    _exit(1);
  });
  // Backward passes are our own: no tensor of a worker records history.
  const c10::InferenceMode no_autograd;
  Server server(*client, connect);
  try {
    server.run();
    return 0;
  } catch (const InputError& error) {
    return fail(*client, "input", error.what(), 2);
  } catch (const StorageError& error) {
    return fail(*client, "resource", error.what(), 3);
  } catch (const comm::PeerLost& error) {
    return fail(*client, "peer", error.what(), 1, {{"peer", error.rank()}});
  } catch (const std::bad_alloc&) {
    return fail(*client, "resource", "out of host memory; lower pages.host_bytes or sequence.chunk", 3);
  } catch (const c10::OutOfMemoryError& error) {
    return fail(*client, "resource",
                "out of device memory in \"" + server.phase() +
                    "\": " + without_advice(error.what_without_backtrace()) +
                    "; lower pages.hbm_bytes, pipeline.activation_bytes or sequence.chunk",
                3);
  } catch (const std::exception& error) {
    return fail(*client, "internal", first_line(error.what()), 1);
  }
}

}  // namespace oomb
