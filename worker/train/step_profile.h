// A Chrome trace of one step: the worker's ranges, LibTorch's operators and, on a GPU, every kernel and copy.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace oomb {

/// Records from construction to save(). One at a time in a process. Recording slows the host down: the figures of such
/// a step are not a benchmark.
class StepProfile {
 public:
  explicit StepProfile(const at::Device& device);
  /// Ends the recording without a file unless save() was called.
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Ends the recording and writes JSON for chrome://tracing or Perfetto. InputError if the file cannot be written.
  void save(const std::string& path);

 private:
  bool recording_ = true;
};

}  // namespace oomb
