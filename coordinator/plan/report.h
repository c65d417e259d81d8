// A plan as JSON, as a table, and in two lines.
#pragma once

#include <string>

#include "coordinator/plan/plan.h"

namespace oomb::plan {

/// One indented object; bytes and seconds are plain numbers. hbm_bytes and host_bytes are of one worker, network of
/// all.
std::string to_json(const Plan& plan);

/// For people, with a newline at the end of every line.
std::string table(const Plan& plan);

/// Memory and expected speed, without newlines; what a run shows when it begins.
std::string short_form(const Plan& plan);

}  // namespace oomb::plan
