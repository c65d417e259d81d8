#include "coordinator/plan/report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "coordinator/status/reporter.h"

namespace oomb::plan {
namespace {

using nlohmann::ordered_json;
using status::format_bytes;
using status::format_count;

constexpr Purpose kPurposes[] = {Purpose::kWeights,     Purpose::kGradients, Purpose::kOptimizer,
                                 Purpose::kActivations, Purpose::kPages,     Purpose::kStaging};

ordered_json bytes_of(const MemoryPlan& memory, Tier tier) {
  ordered_json json;
  for (const Purpose purpose : kPurposes) json[to_string(purpose)] = memory.total(tier, purpose);
  json["total"] = memory.total(tier);
  return json;
}

ordered_json traffic_of(const StepTraffic& traffic) {
  return {{"means", traffic.means},
          {"pages", traffic.pages},
          {"contributions", traffic.contributions},
          {"reduce_scatter", traffic.reduce_scatter},
          {"all_gather", traffic.all_gather}};
}

ordered_json time_of(const StepTime& time) {
  return {{"pass_1", time.pass1},
          {"pass_2", time.pass2},
          {"compute", time.compute},
          {"wait_means", time.wait_means},
          {"wait_pages", time.wait_pages},
          {"wait_host", time.wait_host},
          {"wait_contributions", time.wait_contributions},
          {"tail", time.tail},
          {"collectives", time.collectives},
          {"optimizer", time.optimizer}};
}

std::string number(double value, const char* format) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// Lines of aligned columns: the first to the left, the second to the right, then the rest.
class Lines {
 public:
  void title(const std::string& text) { out_ += text + "\n"; }
  void row(const std::string& name, const std::string& value, const std::string& rest = "") {
    std::string line = "  " + name;
    line.append(line.size() < 34 ? 34 - line.size() : 1, ' ');
    if (value.size() < 12) line.append(12 - value.size(), ' ');
    line += value;
    out_ += line + (rest.empty() ? "" : "  " + rest) + "\n";
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

void add_tier(Lines& lines, const MemoryPlan& memory, Tier tier, const std::string& title, std::int64_t capacity) {
  if (memory.total(tier) == 0) return;
  lines.title(title);
  for (const MemoryItem& item : memory.items) {
    if (item.tier == tier) lines.row(item.name, format_bytes(item.bytes), item.how);
  }
  lines.row("total", format_bytes(memory.total(tier)), capacity >= 0 ? "of " + format_bytes(capacity) : "");
}

void add_time(Lines& lines, const Plan& plan) {
  const StepTime& t = plan.time;
  const auto share = [&](double seconds) { return number(100 * seconds / t.total, "%.1f %%"); };
  const auto row = [&](const char* name, double seconds) {
    if (seconds > 0) lines.row(name, number(seconds, "%.3f s"), share(seconds));
  };
  lines.title("step" + std::string(plan.slowdown ? "" : " (assumed)"));
  row("compute", t.compute);
  row("wait for means", t.wait_means);
  row("wait for pages of others", t.wait_pages);
  row("wait for pages on the host", t.wait_host);
  row("wait for contributions", t.wait_contributions);
  row("tail of the last round", t.tail);
  row("gradients and parameters", t.collectives);
  row("optimizer", t.optimizer);
  lines.row("total", number(t.total, "%.3f s"),
            "pass 1 " + number(t.pass1, "%.3f") + " s, pass 2 " + number(t.pass2, "%.3f") + " s");
  lines.row("tokens per second", format_count(plan.tokens_per_second()),
            format_count(plan.tokens_per_second() / static_cast<double>(plan.layout.workers)) + " a worker" +
                (plan.mfu > 0 ? ", MFU " + number(100 * plan.mfu, "%.1f %%") : ""));
}

void add_traffic(Lines& lines, const Plan& plan) {
  if (plan.layout.workers == 1) return;
  const auto row = [&](const char* name, double bytes, const std::string& rest = "") {
    lines.row(name, format_bytes(static_cast<std::int64_t>(bytes)), rest);
  };
  lines.title("network, all workers, one step (exchange " + std::string(oomb::to_string(plan.exchange)) + ")");
  row("page means", plan.traffic.means);
  row("pages", plan.traffic.pages, "expected");
  row("contributions", plan.traffic.contributions, "expected");
  row("weight gradients, parameters", plan.traffic.reduce_scatter + plan.traffic.all_gather);
  row("total", plan.traffic.total());
  row("a ring's total", plan.ring.total(), "one-shot zig-zag ring attention, same reduction of weight gradients");
}

}  // namespace

std::string to_json(const Plan& plan) {
  ordered_json json;
  json["fits"] = plan.fits();
  json["workers"] = plan.layout.workers;
  json["group_workers"] = plan.layout.group_workers;
  json["groups"] = plan.layout.groups();
  json["tokens_per_step"] = plan.tokens_per_step();
  json["seconds_per_step"] = plan.time.total;
  json["tokens_per_second"] = plan.tokens_per_second();
  json["mfu"] = plan.mfu;
  json["hbm_bytes"] = bytes_of(plan.memory, Tier::kHbm);
  json["host_bytes"] = bytes_of(plan.memory, Tier::kHost);
  json["disk_bytes"] = plan.memory.total(Tier::kDisk);
  json["hbm_capacity_bytes"] = plan.memory.hbm_capacity;
  json["host_capacity_bytes"] = plan.memory.host_capacity;
  json["page_bytes"] = {{"expected", plan.memory.page_bytes_expected}, {"most", plan.memory.page_bytes_most}};
  json["network"] = {{"bytes_per_step", plan.traffic.total()},
                     {"ring_bytes_per_step", plan.ring.total()},
                     {"exchange", std::string(oomb::to_string(plan.exchange))},
                     {"parts", traffic_of(plan.traffic)},
                     {"ring_parts", traffic_of(plan.ring)}};
  json["time"] = time_of(plan.time);
  json["max_sequence"] = plan.max_sequence;
  json["binds"] = plan.binds;
  json["problems"] = plan.memory.problems;
  json["changes"] = plan.changes;
  json["measured_over_simulated"] = plan.slowdown ? ordered_json(*plan.slowdown) : ordered_json();
  json["notes"] = plan.notes;
  ordered_json items = ordered_json::array();
  for (const MemoryItem& item : plan.memory.items) {
    items.push_back({{"tier", to_string(item.tier)},
                     {"purpose", to_string(item.purpose)},
                     {"name", item.name},
                     {"bytes", item.bytes},
                     {"how", item.how}});
  }
  json["items"] = std::move(items);
  return json.dump(2);
}

std::string table(const Plan& plan) {
  Lines lines;
  const Layout& l = plan.layout;
  lines.title(
      plan.run_name + ": " + std::to_string(plan.sequences_per_step) + " x " + std::to_string(plan.sequence_length) +
      " tokens a step on " + std::to_string(l.workers) + (l.workers == 1 ? " worker" : " workers") +
      (l.groups() > 1 ? ", " + std::to_string(l.groups()) + " groups of " + std::to_string(l.group_workers) : "") +
      " (" + plan.hardware.name + ")");
  add_tier(lines, plan.memory, Tier::kHbm, "HBM of a worker", plan.memory.hbm_capacity);
  add_tier(lines, plan.memory, Tier::kHost, "host memory of a worker", plan.memory.host_capacity);
  add_tier(lines, plan.memory, Tier::kDisk, "disk", plan.hardware.disk_bytes);
  add_time(lines, plan);
  add_traffic(lines, plan);
  lines.title(plan.fits() ? "it fits" : "it does not fit");
  for (const std::string& problem : plan.memory.problems) lines.row("missing:", "", problem);
  lines.row("longest sequence", std::to_string(plan.max_sequence), "tokens");
  if (plan.fits() && !plan.binds.empty()) lines.row("one chunk more:", "", plan.binds);
  for (const std::string& change : plan.changes) lines.row("would fit with:", "", "--set " + change);
  for (const std::string& note : plan.notes) lines.title("note: " + note);
  return lines.take();
}

std::string short_form(const Plan& plan) {
  const MemoryPlan& m = plan.memory;
  std::string text = "plan: ";
  if (m.hbm_capacity > 0) {
    text += "HBM " + format_bytes(m.total(Tier::kHbm)) + " of " + format_bytes(m.hbm_capacity) + ", ";
  }
  return text + "host " + format_bytes(m.total(Tier::kHost)) + " of " + format_bytes(m.host_capacity) +
         " a worker; about " + format_count(plan.tokens_per_second()) + " tokens/s; at most " +
         std::to_string(plan.max_sequence) + " tokens a sequence";
}

}  // namespace oomb::plan
