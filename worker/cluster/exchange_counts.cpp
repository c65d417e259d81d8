#include "worker/cluster/exchange_counts.h"

namespace oomb::cluster {

const char* name_of(ExchangePass pass) {
  switch (pass) {
    case ExchangePass::pass1:
      return "pass 1";
    case ExchangePass::pass2:
      return "pass 2";
    case ExchangePass::evaluation:
      return "evaluation";
  }
  return "?";
}

ExchangeCounts& ExchangeCounts::operator+=(const ExchangeCounts& other) {
  pages_fetched += other.pages_fetched;
  page_hits += other.page_hits;
  page_bytes += other.page_bytes;
  contributions_sent += other.contributions_sent;
  contributions_fetched += other.contributions_fetched;
  contribution_bytes += other.contribution_bytes;
  means_received += other.means_received;
  means_bytes += other.means_bytes;
  means_seconds += other.means_seconds;
  page_seconds += other.page_seconds;
  contribution_seconds += other.contribution_seconds;
  return *this;
}

double ring_bytes(int64_t num_tokens, int64_t num_layers, int num_workers, int64_t token_bytes,
                  int64_t token_gradient_bytes) {
  if (num_workers == 1) return 0;
  const double share = static_cast<double>(num_tokens) / num_workers;
  const double around = num_workers - 1;
  return static_cast<double>(num_layers) * share *
         (3 * around * static_cast<double>(token_bytes) + num_workers * static_cast<double>(token_gradient_bytes));
}

ExchangeCounts ExchangeLedger::total() const {
  ExchangeCounts sum;
  for (const ExchangeCounts& counts : counts_) sum += counts;
  return sum;
}

}  // namespace oomb::cluster
