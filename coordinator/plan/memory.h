// Where every byte of a worker goes: HBM, its share of the host, disk; and whether that fits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/run_config.h"
#include "coordinator/plan/layout.h"
#include "coordinator/plan/resolve.h"
#include "worker/model/hf_config.h"

namespace oomb::plan {

enum class Tier : std::uint8_t { kHbm, kHost, kDisk };
/// The sums that are shown; an item belongs to one.
enum class Purpose : std::uint8_t { kWeights, kGradients, kOptimizer, kActivations, kPages, kStaging };
const char* to_string(Tier tier);
const char* to_string(Purpose purpose);

struct MemoryItem {
  Tier tier = Tier::kHbm;
  Purpose purpose = Purpose::kWeights;
  std::string name;
  std::int64_t bytes = 0;
  std::string how;  // what it is made of; says "assumed" where it is not derived
};

struct MemoryPlan {
  std::vector<MemoryItem> items;                     // of one worker; disk: of the whole run
  std::int64_t hbm_capacity = 0, host_capacity = 0;  // of one worker; host: its part of the node's memory
  Activations level = Activations::kInput;           // what a chunk that is computed again keeps
  std::int64_t kept_chunks = 1;                      // newest chunks of a worker that keep at least attention outputs
  std::int64_t host_chunks = 0;                      // before these, chunks whose attention outputs wait in host memory
  std::int64_t whole_chunks = 0;                     // of these, those that keep all of `level`
  double homes_in_hbm = 0, gradients_in_hbm = 0;     // parts of the homes and gradient slots, 0 to 1
  std::vector<std::string> problems;                 // what does not fit, and by how much; empty: it fits
  std::int64_t page_bytes_expected = 0, page_bytes_most = 0;
  bool fits_at_most = true;  // also if every page that may be selected is

  bool fits() const { return problems.empty(); }
  std::int64_t total(Tier tier) const;
  std::int64_t total(Tier tier, Purpose purpose) const;
};

/// Sums of worker/sizes over the tiers. HBM beyond state, work and pages goes to activations that are then not computed
/// twice, and so does host memory that even all gradient slots would leave, as the worker does it. Pages take what
/// pages.hbm_bytes allows, homes first; the rest is the host's. Gradient slots count as expected
/// (worker/sizes/page_demand.h), all of them with dense attention.
MemoryPlan plan_memory(const RunConfig& config, const model::ModelConfig& model, const Hardware& hardware,
                       const Layout& layout);

}  // namespace oomb::plan
