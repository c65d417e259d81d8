#include "comm/exchange/link_measurement.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

namespace oomb::comm {

LinkMeasurement measure_link(Transport& transport, double seconds, Deadline deadline) {
  LinkMeasurement result;
  if (transport.size() == 1) return result;
  result.peer = (transport.rank() + 1) % transport.size();
  constexpr std::int64_t in_flight = 8;
  std::vector<std::byte> target(static_cast<std::size_t>(in_flight * kProbeBytes));
  const std::string what = "a measurement of the link from worker " + std::to_string(result.peer);
  const auto get = [&](std::int64_t count, std::int64_t bytes) {
    std::array<GetRequest, in_flight> requests;
    for (std::int64_t i = 0; i < count; ++i) {
      requests[static_cast<std::size_t>(i)] = {
          result.peer, {kProbeSegment, 0}, target.data() + i * kProbeBytes, bytes, MemoryKind::kHost};
    }
    const auto begun = Clock::now();
    transport.wait(transport.get(std::span(requests).first(static_cast<std::size_t>(count))), deadline, what);
    return std::chrono::duration<double>(Clock::now() - begun).count();
  };

  get(in_flight, kProbeBytes);  // the first transfer sets up what later ones reuse
  std::vector<double> latencies;
  for (int i = 0; i < 15; ++i) latencies.push_back(get(1, 8));
  std::nth_element(latencies.begin(), latencies.begin() + 7, latencies.end());
  result.get_seconds = latencies[7];
  double spent = 0;
  std::int64_t moved = 0;
  while (spent < seconds) {
    spent += get(in_flight, kProbeBytes);
    moved += in_flight * kProbeBytes;
  }
  result.get_gbps = spent > 0 ? static_cast<double>(moved) / spent * 1e-9 : 0;
  return result;
}

std::string describe(const LinkMeasurement& measurement, const Transport& transport) {
  if (measurement.peer < 0) return "no links in a group of one";
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "gets %.2f GB/s, %.0f us from worker %d over ", measurement.get_gbps,
                measurement.get_seconds * 1e6, measurement.peer);
  return text.data() + transport.description();
}

}  // namespace oomb::comm
