// What the links between workers give, measured at start-up over the probe segments, to be printed beside the plan.
#pragma once

#include <string>

#include "comm/exchange/transport.h"

namespace oomb::comm {

struct LinkMeasurement {
  int peer = -1;           ///< the next rank, from which was read; -1 in a group of one
  double get_gbps = 0;     ///< 10^9 bytes per second, gets of kProbeBytes, 8 in flight
  double get_seconds = 0;  ///< one get of 8 bytes, median
};

/// Reads from the next rank for about `seconds`. Not collective: a peer need only be connected. When all ranks measure
/// at the same time, all links are busy, which is what training sees.
LinkMeasurement measure_link(Transport& transport, double seconds, Deadline deadline);
/// "gets 1.31 GB/s, 9 us from rank 1 over ucx tcp".
std::string describe(const LinkMeasurement& measurement, const Transport& transport);

}  // namespace oomb::comm
