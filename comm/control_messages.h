// The control channel between the coordinator and the workers: what is said, in which order.
//
// A message is a 4-byte big-endian length and that many bytes of a JSON object with a text `type`. Steps are numbered
// from 1; "steps done" is the number of the last one done, 0 before the first.
//
//   worker -> coordinator
//     hello        secret, rank, size, host, pid             first message of a connection
//     heartbeat    phase                                     what the worker is doing, in a few words; sent by itself
//     ready        device, parameters, resumed_step, checkpoint, lines
//                                                            resumed_step: steps done by the checkpoint gone on from,
//                                                            0 without one; checkpoint: its path or ""; lines: texts to
//                                                            show. The next step is resumed_step + 1.
//     step_done    step, loss, tokens, seconds, grad_norm, lr, hbm_peak_bytes, host_peak_bytes, ...
//                                                            tokens of this step over all workers; further keys go into
//                                                            metrics.jsonl as they are. Non-finite numbers are null.
//     checkpoint_done  path, bytes, seconds
//     evaluated    loss, tokens                              mean loss over `tokens` labels of held-out data
//     bench_done   facts (an object: machine, mode, timing, ceilings, check), rows (objects; which, and their fields:
//                                                            worker/bench/bench_server.h)
//     log          level (debug|info|warning|error), text
//     failed       kind (input|internal|resource), message   the last message of a worker that gives up; one line
//
//   coordinator -> worker
//     welcome      config (resolved, an object), mode (train|eval|bench), heartbeat_seconds, lost_seconds
//     refused      reason                                    the connection ends
//     run_step     step
//     checkpoint
//     evaluate
//     bench        measure (step|attention|select|kernels), length (tokens of a sequence), warmup, repeats
//     finish                                                 the worker ends with status 0
//
// A worker answers run_step, checkpoint, evaluate and bench with one step_done, checkpoint_done, evaluated or
// bench_done (or failed); it gets no further request before that. In mode eval it gets one evaluate, in mode bench only
// bench.
#pragma once

#include <cstddef>

namespace oomb::comm {

namespace message {
inline constexpr char kHello[] = "hello";
inline constexpr char kHeartbeat[] = "heartbeat";
inline constexpr char kReady[] = "ready";
inline constexpr char kStepDone[] = "step_done";
inline constexpr char kCheckpointDone[] = "checkpoint_done";
inline constexpr char kEvaluated[] = "evaluated";
inline constexpr char kBenchDone[] = "bench_done";
inline constexpr char kLog[] = "log";
inline constexpr char kFailed[] = "failed";

inline constexpr char kWelcome[] = "welcome";
inline constexpr char kRefused[] = "refused";
inline constexpr char kRunStep[] = "run_step";
inline constexpr char kCheckpoint[] = "checkpoint";
inline constexpr char kEvaluate[] = "evaluate";
inline constexpr char kBench[] = "bench";
inline constexpr char kFinish[] = "finish";
}  // namespace message

/// Longest message body. Before a connection has shown the secret, kMaxHelloBytes holds.
inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxHelloBytes = std::size_t{1} << 13;

/// How a worker learns where its coordinator is. The secret travels in the environment only: not in arguments, logs or
/// files that others can read.
inline constexpr char kHostVariable[] = "OOMB_CONTROL_HOST";
inline constexpr char kPortVariable[] = "OOMB_CONTROL_PORT";
inline constexpr char kSecretVariable[] = "OOMB_CONTROL_SECRET";

}  // namespace oomb::comm
