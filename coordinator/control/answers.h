// The cluster's one answer to a request, out of its workers' answers. What a key means over W workers:
//
//   equal      step, loss, tokens, labels, tokens_crc32c, grad_norm, lr, parameters, resumed_step, checkpoint
//              Each worker tells the cluster's value (all have the same settings and end the same reductions), so it is
//              taken once and never summed. Checked: integers and texts exactly, other numbers to kAgreement, as the
//              order of a reduction may differ in the last bits.
//   sum        bytes, and keys that end in _bytes: each worker tells its own
//   maximum    seconds, and keys that end in _seconds: the cluster waits for the slowest
//   rank 0     path, lines
//   any other  the value when all tell the same, else the list of values in the order of ranks
//
// A null (a number that is not finite) makes a sum or maximum null; an equal key must then be null everywhere.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace oomb::control {

/// Largest relative difference of two workers' floating-point values that must be equal.
inline constexpr double kAgreement = 1e-6;

/// The merged message of answers of one type, `by_rank` not empty. WorkerLost when workers disagree, or when a sum or
/// maximum is asked of something that is no number; both name the key and the ranks.
nlohmann::json merge_answers(const std::vector<nlohmann::json>& by_rank);

}  // namespace oomb::control
