#include "worker/train/step_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <fstream>
#include <set>

#include "configs/error.h"

namespace oomb {

namespace profiler = torch::autograd::profiler;

StepProfile::StepProfile(const at::Device& device) {
  std::set<torch::profiler::impl::ActivityType> activities = {torch::profiler::impl::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(torch::profiler::impl::ActivityType::CUDA);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
}

StepProfile::~StepProfile() {
  if (recording_) profiler::disableProfiler();
}

void StepProfile::save(const std::string& path) {
  // The profiler reports a path that it cannot open on its own log only.
  if (!std::ofstream(path, std::ios::app)) {
    throw InputError("profile.file: cannot write " + path + "; allowed: a path in a folder that exists");
  }
  recording_ = false;
  profiler::disableProfiler()->save(path);
}

}  // namespace oomb
