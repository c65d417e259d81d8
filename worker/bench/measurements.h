// The four things that can be measured; each returns its rows.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "worker/bench/workbench.h"

namespace oomb::bench {

/// Whole optimizer steps of the run on sequences of bench.length tokens: one row with length, tokens (of a step), notes
/// (what the worker decided, where the data came from), and of every repeat seconds, pass1_seconds, pass2_seconds,
/// optimizer_seconds, loss, grad_norm (work that was left out would show there). From the median: tokens_per_second,
/// model_flops (model_flops.h), model_flops_per_second, of_gemm (its share of the measured product), mfu (its share of
/// the stated peak, null without); tokens_per_second_min and _max. Peaks since the row began: hbm_peak_bytes,
/// host_peak_bytes, page_fast_peak_bytes, page_host_peak_bytes.
nlohmann::json measure_steps(const Workbench& bench);

/// Forward and backward of one layer's attention for the last full chunk of the sequence, all pages in the fast tier:
/// own chunk, and own chunk with past pages, each timed; "past pages" rows are the differences of their medians.
nlohmann::json measure_attention(const Workbench& bench);

/// Means of a chunk's pages, and the choice of past pages: votes, top-k, and all of it as the pipeline calls it.
/// InputError for a run that selects nothing, or a sequence too short to have a choice.
nlohmann::json measure_selection(const Workbench& bench);

/// The element-wise ops, the loss and the weight-gradient product, at the sizes of the run's model and chunk.
nlohmann::json measure_kernels(const Workbench& bench);

}  // namespace oomb::bench
