// Times single calls: on a GPU by events on the stream, with the second-level cache emptied before each; on a CPU by a
// steady clock, with caches as the call before left them.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace oomb::bench {

struct Repeats {
  int64_t warmup = 0, count = 0;
};

/// Not thread-safe. Works on the device's current stream.
class Timer {
 public:
  explicit Timer(const at::Device& device);

  /// Seconds of each of `repeats.count` calls that follow `repeats.warmup` untimed ones.
  std::vector<double> time(const Repeats& repeats, const std::function<void()>& call) const;

  const char* clock() const;
  /// Bytes overwritten before each call to empty the cache; 0 on a CPU.
  int64_t flushed_bytes() const;

 private:
  at::Device device_;
  at::Tensor flush_;
};

}  // namespace oomb::bench
