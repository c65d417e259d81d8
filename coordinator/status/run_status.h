// What a run folder tells about its run, read from outside: nothing is asked of the processes and nothing is written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "configs/run_config.h"

namespace oomb::status {

struct RunStatus {
  std::string name;
  bool running = false;               // a coordinator holds the folder's lock
  std::int64_t step = 0;              // last one in metrics.jsonl; 0: none
  std::int64_t last_step = 0;         // where the run ends
  std::optional<double> loss;         // of `step`; absent when it is no number
  std::optional<double> eval_loss;    // the last one in metrics.jsonl's end
  double tokens_per_second = 0;       // over the last kRecentSteps
  double seconds_left = 0;            // to last_step at that speed
  std::int64_t checkpoint_step = -1;  // newest one with its marker; -1: none
  std::string checkpoint;             // its path
};

inline constexpr int kRecentSteps = 20;

/// Of the run that `config` describes; settings that the folder's own config.json has from the last start win. A folder
/// that is not there is a run that has not started. InputError when the folder's files cannot be read.
RunStatus read_run_status(const RunConfig& config);

/// One line of words, or one line of JSON with the fields above (checkpoint null when there is none).
std::string status_text(const RunStatus& status);
std::string status_json(const RunStatus& status);

}  // namespace oomb::status
