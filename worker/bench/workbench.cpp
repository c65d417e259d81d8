#include "worker/bench/workbench.h"

#include "worker/bench/statistics.h"

namespace oomb::bench {

nlohmann::json timed_row(const Workbench& bench, const std::string& op, const std::string& shape, const Work& work,
                         const std::function<void()>& call) {
  bench.phase("measuring " + op);
  const std::vector<double> seconds = bench.timer.time(bench.repeats, call);
  nlohmann::json row = {{"op", op}, {"shape", shape}, {"seconds", seconds}};
  const double typical = median(seconds);
  if (work.bytes > 0) {
    row["bytes"] = work.bytes;
    row["bytes_per_second"] = work.bytes / typical;
    row["share"] = work.bytes / typical / bench.ceilings.copy_rate;
  }
  if (work.flops > 0) {
    row["flops"] = work.flops;
    row["flops_per_second"] = work.flops / typical;
    row["share"] = work.flops / typical / bench.ceilings.gemm_rate;
  }
  return row;
}

std::string shape_text(std::initializer_list<int64_t> sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

}  // namespace oomb::bench
