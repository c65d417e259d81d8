#include "coordinator/control/supported.h"

#include <string>

#include "configs/error.h"

namespace oomb::control {

void refuse_unsupported(const RunConfig& config) {
  const auto require = [](bool holds, const std::string& text) {
    if (!holds) throw InputError(text);
  };
  require(config.topology.workers == 1, "topology.workers: " + std::to_string(config.topology.workers) +
                                            " workers are not supported yet; allowed: 1 (`oomb plan` takes more)");
  require(config.pages.dtype != PageDtype::kFp8,
          "pages.dtype: fp8 is not supported yet; allowed: auto (`oomb plan` takes it)");
  require(config.pipeline.sequences_in_flight == 1,
          "pipeline.sequences_in_flight: " + std::to_string(config.pipeline.sequences_in_flight) +
              " is not supported yet; allowed: 1 (`oomb plan` takes more)");
}

}  // namespace oomb::control
