#include "worker/train/step_message.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "comm/control_messages.h"

namespace oomb {

namespace {

using cluster::ExchangeCounts;
using cluster::ExchangeLedger;
using cluster::ExchangePass;
using nlohmann::json;

constexpr std::pair<const char*, int64_t ExchangeCounts::*> kKinds[] = {
    {"pages_fetched", &ExchangeCounts::pages_fetched},
    {"page_hits", &ExchangeCounts::page_hits},
    {"page_bytes", &ExchangeCounts::page_bytes},
    {"contributions_sent", &ExchangeCounts::contributions_sent},
    {"contributions_fetched", &ExchangeCounts::contributions_fetched},
    {"contribution_bytes", &ExchangeCounts::contribution_bytes},
    {"means_received", &ExchangeCounts::means_received},
    {"means_bytes", &ExchangeCounts::means_bytes}};

json by_layer(const ExchangeLedger& ledger, ExchangePass pass) {
  json kinds = json::object();
  for (const auto& [name, kind] : kKinds) {
    json counts = json::array();
    bool any = false;
    for (int64_t layer = 0; layer < ledger.num_layers(); ++layer) {
      const int64_t count = ledger.at(pass, layer).*kind;
      any = any || count != 0;
      counts.push_back(count);
    }
    if (any) kinds[name] = std::move(counts);
  }
  return kinds;
}

void add_exchange(const StepReport& report, json& message) {
  const ExchangeLedger& ledger = *report.exchange;
  json passes = json::object();
  constexpr std::pair<const char*, ExchangePass> kPasses[] = {
      {"pass1", ExchangePass::pass1}, {"pass2", ExchangePass::pass2}, {"evaluation", ExchangePass::evaluation}};
  for (const auto& [name, pass] : kPasses) {
    json kinds = by_layer(ledger, pass);
    if (!kinds.empty()) passes[name] = std::move(kinds);
  }
  const ExchangeCounts sum = ledger.total();
  message["exchange"] = std::move(passes);
  message["exchange_page_bytes"] = sum.page_bytes;
  message["exchange_contribution_bytes"] = sum.contribution_bytes;
  message["exchange_means_bytes"] = sum.means_bytes;
  message["means_wait_seconds"] = sum.means_seconds;
  message["page_wait_seconds"] = sum.page_seconds;
  message["contribution_wait_seconds"] = sum.contribution_seconds;
  message["ring_bytes"] = report.ring_bytes;
}

}  // namespace

json step_message(const StepReport& r) {
  json message = {{"type", comm::message::kStepDone},
                  {"step", r.step},
                  {"loss", r.loss},
                  {"tokens", r.tokens},
                  {"labels", r.labels},
                  {"tokens_crc32c", r.tokens_crc32c},
                  {"seconds", r.seconds},
                  {"compute_seconds", r.compute_seconds},
                  {"grad_norm", r.gradient_norm},
                  {"lr", r.learning_rate},
                  {"hbm_peak_bytes", r.hbm_peak_bytes},
                  {"host_peak_bytes", r.host_peak_bytes},
                  {"page_fast_peak_bytes", r.page_fast_bytes},
                  {"page_host_peak_bytes", r.page_host_bytes},
                  {"pass1_seconds", r.pass1_seconds},
                  {"pass2_seconds", r.pass2_seconds},
                  {"optimizer_seconds", r.optimizer_seconds}};
  if (r.exchange) add_exchange(r, message);
  return message;
}

}  // namespace oomb
