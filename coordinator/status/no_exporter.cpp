// The exporter of a build without prometheus-cpp.
#include <nlohmann/json.hpp>

#include "configs/error.h"
#include "coordinator/status/exporter.h"

namespace oomb::status {

struct Exporter::Impl {};

Exporter::Exporter(const RunConfig& config) {
  if (config.status.port != 0) {
    throw InputError("status.port: " + std::to_string(config.status.port) +
                     ", but this oomb was built without prometheus-cpp; allowed: 0");
  }
}

Exporter::~Exporter() = default;
void Exporter::step(const nlohmann::ordered_json&) {}
void Exporter::checkpoint(std::int64_t) {}
void Exporter::relaunch() {}

}  // namespace oomb::status
