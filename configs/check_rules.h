// Rules about several settings at once; private to configs/.
#pragma once

#include <map>
#include <string>

#include "configs/run_config.h"

namespace oomb::schema {

/// Where each setting that was given was written.
struct Places {
  std::string document;                        // the run file, for settings that were not given
  std::map<std::string, std::string> written;  // section.field -> FILE:LINE or the override
};

/// Throws the InputError of the first rule that does not hold; its text names every setting of the rule.
void check_rules(const RunConfig& config, const Places& places);

}  // namespace oomb::schema
