// Named ranges of the worker's host thread, for profilers: NVTX (Nsight tools) and LibTorch's profiler (StepProfile).
// Without a profiler attached a range costs well under a microsecond.
#pragma once

#include <ATen/record_function.h>

namespace oomb {

/// Open from construction to destruction; ranges of a thread nest. `name` must live as long as the range.
class TraceRange {
 public:
  explicit TraceRange(const char* name);
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
};

}  // namespace oomb
