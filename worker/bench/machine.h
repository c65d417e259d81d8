// What a measurement was made on and with.
#pragma once

#include <ATen/ATen.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace oomb::bench {

/// device, gpu (null on a CPU), cpu, threads, torch, cuda and driver (null without), commit ("unknown" where the build
/// was not configured in a clone).
nlohmann::json machine_facts(const at::Device& device);

/// The peak of dense matrix products that the maker states for a device, FLOP/s; nothing where we know of none.
struct StatedPeak {
  double flops = 0;
  std::string source;
};
std::optional<StatedPeak> stated_peak(const at::Device& device, at::ScalarType type);

}  // namespace oomb::bench
