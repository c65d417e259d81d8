// Correctness before speed: the gradients of a small model of the run's kind, computed as the run computes them,
// against the pipeline in double precision on the CPU with the same selected pages.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "worker/model/parameters.h"
#include "worker/pipeline/sequence_pipeline.h"

namespace oomb::bench {

struct GradientCheck {
  double worst_error = 0;  ///< of |a - b| / max(|b|, 1e-3 |all gradients|) over the tensors; infinite for NaN
  std::string tensor;      ///< where
  double loss_error = 0;   ///< relative
  double bound = 0;        ///< for both errors
  int64_t tokens = 0, layers = 0, chunk = 0, budget_pages = 0;  ///< of the small model's sequence

  bool passed() const { return worst_error <= bound && loss_error <= bound; }
  nlohmann::json json() const;
};

/// The error that rounding may cause, three standard deviations. On the way from the ids to a gradient 20 L + 6 results
/// are rounded to the compute type (per layer ten forward and ten backward), each by an independent relative error of
/// variance u^2 / 3 with u the unit roundoff of the coarser of compute and gradient-slot type. Inside, each takes about
/// ten operations in the accumulator type (exponentials, roots, products), and sums over `longest_sum` terms one
/// rounding a term: these count where the accumulator is no finer than the compute type.
double rounding_bound(const TensorTypes& types, at::ScalarType slot_type, int64_t layers, int64_t longest_sum);

/// Fills worst_error and tensor.
void compare_gradients(const model::Parameters& got, const model::Parameters& expected, GradientCheck& check);

/// `config` and `options` are the run's. Takes seconds.
GradientCheck check_gradients(const model::ModelConfig& config, const PipelineOptions& options,
                              const TensorTypes& types);

/// std::runtime_error with all figures unless the check passed: no speed of a wrong result is ever shown.
void require_passed(const GradientCheck& check);

}  // namespace oomb::bench
