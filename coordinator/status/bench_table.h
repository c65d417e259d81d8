// Results of `oomb bench` as aligned text. Fields: worker/bench/bench_server.h.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace oomb::status {

/// Machine, mode, timing, ceilings and the gradient check, a line each.
std::string bench_facts_text(const nlohmann::json& facts);

/// A table; `header`: with its head and what it needs to be read. Absent values are shown as "-".
std::string bench_rows_text(const std::string& measure, const nlohmann::json& rows, bool header);

}  // namespace oomb::status
