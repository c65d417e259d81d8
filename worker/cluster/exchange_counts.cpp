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

ExchangeCounts ExchangeLedger::total() const {
  ExchangeCounts sum;
  for (const ExchangeCounts& counts : counts_) sum += counts;
  return sum;
}

}  // namespace oomb::cluster
