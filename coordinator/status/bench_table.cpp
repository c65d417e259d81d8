#include "coordinator/status/bench_table.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "coordinator/status/reporter.h"

namespace oomb::status {
namespace {

using nlohmann::json;

std::string text_of(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// The value of a field as `format` prints `scale` times it.
std::string number(const json& row, const char* key, const char* format, double scale = 1) {
  const auto entry = row.find(key);
  if (entry == row.end() || !entry->is_number()) return "-";
  return text_of(format, entry->get<double>() * scale);
}

std::vector<double> sorted(const json& row, const char* key) {
  std::vector<double> values;
  const auto entry = row.find(key);
  if (entry == row.end() || !entry->is_array()) return values;
  for (const json& value : *entry) {
    if (value.is_number()) values.push_back(value.get<double>());
  }
  std::sort(values.begin(), values.end());
  return values;
}

// "min / median / max", or the one value there is.
std::string spread(const json& row, const char* key, const char* format, double scale = 1) {
  const std::vector<double> v = sorted(row, key);
  if (v.empty()) return "-";
  if (v.front() == v.back()) return text_of(format, v.front() * scale);
  const double middle = (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
  return text_of(format, v.front() * scale) + " / " + text_of(format, middle * scale) + " / " +
         text_of(format, v.back() * scale);
}

std::string bytes(const json& row, const char* key) {
  const auto entry = row.find(key);
  return entry != row.end() && entry->is_number_integer() ? format_bytes(entry->get<std::int64_t>()) : "-";
}

std::string word(const json& row, const char* key) {
  const auto entry = row.find(key);
  return entry != row.end() && entry->is_string() ? entry->get<std::string>() : "-";
}

struct Column {
  const char* title;
  int width;  // negative: left-aligned
  std::function<std::string(const json& row)> cell;
};

const std::vector<Column>& step_columns() {
  static const std::vector<Column> columns = {
      {"length", 9, [](const json& r) { return number(r, "length", "%.0f"); }},
      {"tokens/s", 24,
       [](const json& r) {
         return number(r, "tokens_per_second_min", "%.0f") + " / " + number(r, "tokens_per_second", "%.0f") + " / " +
                number(r, "tokens_per_second_max", "%.0f");
       }},
      {"step s", 26, [](const json& r) { return spread(r, "seconds", "%.3f"); }},
      {"pass 1", 26, [](const json& r) { return spread(r, "pass1_seconds", "%.3f"); }},
      {"pass 2", 26, [](const json& r) { return spread(r, "pass2_seconds", "%.3f"); }},
      {"optimizer", 26, [](const json& r) { return spread(r, "optimizer_seconds", "%.3f"); }},
      {"MFU", 7, [](const json& r) { return number(r, "mfu", "%.3f"); }},
      {"of GEMM", 7, [](const json& r) { return number(r, "of_gemm", "%.3f"); }},
      {"peak HBM", 10, [](const json& r) { return bytes(r, "hbm_peak_bytes"); }},
      {"peak host", 10, [](const json& r) { return bytes(r, "host_peak_bytes"); }},
      {"loss", 26, [](const json& r) { return spread(r, "loss", "%.5f"); }},
      {"gradient norm", 26, [](const json& r) { return spread(r, "grad_norm", "%.5f"); }},
  };
  return columns;
}

const std::vector<Column>& op_columns() {
  static const std::vector<Column> columns = {
      {"op", -36, [](const json& r) { return word(r, "op"); }},
      {"shape", -34, [](const json& r) { return word(r, "shape"); }},
      {"ms, min / median / max", 28, [](const json& r) { return spread(r, "seconds", "%.3f", 1e3); }},
      {"GB/s", 8, [](const json& r) { return number(r, "bytes_per_second", "%.1f", 1e-9); }},
      {"TFLOP/s", 8, [](const json& r) { return number(r, "flops_per_second", "%.3f", 1e-12); }},
      {"share", 6, [](const json& r) { return number(r, "share", "%.2f"); }},
  };
  return columns;
}

std::string padded(const std::string& text, int width) {
  const std::string space(static_cast<size_t>(std::max(0, std::abs(width) - static_cast<int>(text.size()))), ' ');
  return width < 0 ? text + space : space + text;
}

std::string line_of(const std::vector<Column>& columns, const std::function<std::string(const Column&)>& cell) {
  std::string line;
  for (const Column& column : columns) line += (line.empty() ? "" : "  ") + padded(cell(column), column.width);
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// "key value, key value" of an object's plain entries.
std::string listed(const json& object) {
  std::string text;
  for (const auto& [key, value] : object.items()) {
    if (value.is_null()) continue;
    text += (text.empty() ? "" : ", ") + key + " " + (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

std::string ceilings_text(const json& c) {
  std::string text = "copy " + number(c, "copy_bytes_per_second", "%.1f GB/s", 1e-9) + " (" + bytes(c, "copy_bytes") +
                     ", read and written), product of size " + number(c, "gemm_size", "%.0f") + " " +
                     number(c, "gemm_flops_per_second", "%.3f TFLOP/s", 1e-12) + "; both measured";
  if (c.contains("stated_peak_flops") && c["stated_peak_flops"].is_number()) {
    text += "; assumed peak " + number(c, "stated_peak_flops", "%.0f TFLOP/s", 1e-12) + " (" +
            word(c, "stated_peak_source") + ")";
  } else {
    text += "; no stated peak is known for this device and type, so MFU is not shown";
  }
  return text;
}

std::string check_text(const json& c) {
  return "gradients against double precision: worst relative error " + number(c, "worst_error", "%.2e") + " (" +
         word(c, "tensor") + "), loss " + number(c, "loss_error", "%.2e") + ", allowed " + number(c, "bound", "%.2e") +
         "; " + number(c, "layers", "%.0f") + " small layers, " + number(c, "tokens", "%.0f") +
         " tokens, the same pages";
}

constexpr char kStepLegend[] =
    "tokens/s and the parts of a step in seconds: min / median / max. MFU = model FLOP/s of the median over the "
    "stated\n"
    "peak, \"of GEMM\" over the measured product; model FLOPs of a step: 6 * parameters * tokens, without the table "
    "of\n"
    "an untied input embedding, + 12 * query heads * head dim * layers * keys attended to: for dense attention the\n"
    "causal half, for topk only the own chunk's and the retrieved ones; nothing that is computed again.\n";
constexpr char kOpLegend[] =
    "Rates of the median, over bytes or operations that cannot be avoided; share: of the measured copy or product.\n";

}  // namespace

std::string bench_facts_text(const json& facts) {
  const auto part = [&](const char* key) { return facts.contains(key) ? facts[key] : json::object(); };
  return "machine   " + listed(part("machine")) + "\nmode      " + listed(part("mode")) + "\ntiming    " +
         listed(part("timing")) + "\nceilings  " + ceilings_text(part("ceilings")) + "\ncheck     " +
         check_text(part("check")) + "\n";
}

std::string bench_rows_text(const std::string& measure, const json& rows, bool header) {
  const bool steps = measure == "step";
  const std::vector<Column>& columns = steps ? step_columns() : op_columns();
  std::string text;
  if (header) {
    text += std::string(steps ? kStepLegend : kOpLegend) + "\n";
    text += line_of(columns, [](const Column& column) { return column.title; });
  }
  for (const json& row : rows) {
    text += line_of(columns, [&](const Column& column) { return column.cell(row); });
    if (!row.contains("notes")) continue;
    for (const json& note : row["notes"]) text += "          " + note.get<std::string>() + "\n";
  }
  return text;
}

}  // namespace oomb::status
