#include "configs/run_config.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "configs/check_rules.h"
#include "configs/reader.h"

namespace oomb {
namespace {

using schema::FieldInfo;
using schema::join;
using schema::Node;

// A table cell must not end early.
std::string cell(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    if (c == '|') escaped.push_back('\\');
    escaped.push_back(c);
  }
  return escaped;
}

struct ReferencePrinter {
  std::ostringstream& out;
  std::string prefix;
  template <typename T>
  void field(const T& value, const FieldInfo& info) {
    std::string initial = schema::write(value).dump();
    if (initial == "\"\"") initial = "empty";
    if (initial.starts_with('"')) initial = initial.substr(1, initial.size() - 2);
    const std::string unit = *info.unit == '\0' ? "" : std::string(" (") + info.unit + ")";
    out << "| `" << join(prefix, info.name) << "` | " << cell(initial) << " | "
        << cell(schema::allowed(value, info.limits)) << unit << " | " << cell(info.doc) << " |\n";
  }
  template <typename S>
  void section(const S& object, const char* name, const char* doc) {
    ReferencePrinter inner{out, join(prefix, name)};
    out << "| **" << inner.prefix << "** | | | " << doc << " |\n";
    schema::visit_fields(object, inner);
  }
};

RunConfig read(const Node& root, const std::string& name, const std::filesystem::path& folder, bool fill_names) {
  schema::Places places;
  places.document = name;
  RunConfig config;
  schema::read_settings(root, folder, places, config);
  if (config.run.name.empty() && fill_names) config.run.name = std::filesystem::path(name).stem().string();
  if (config.run.dir.empty()) config.run.dir = (folder / "runs" / config.run.name).lexically_normal();
  if (config.checkpoint.dir.empty()) config.checkpoint.dir = config.run.dir / "checkpoints";
  schema::check_rules(config, places);
  return config;
}

}  // namespace

RunConfig parse_run_config(std::string_view yaml, const std::string& name, const std::filesystem::path& folder,
                           std::span<const std::string> overrides) {
  Node root = schema::parse_yaml(yaml, name);
  for (const std::string& text : overrides) schema::apply_override(root, text);
  return read(root, name, folder, true);
}

RunConfig load_run_config(const std::filesystem::path& file, std::span<const std::string> overrides) {
  const std::string text = schema::read_settings_file(file, "run");
  return parse_run_config(text, file.string(), std::filesystem::absolute(file).parent_path().lexically_normal(),
                          overrides);
}

std::string to_json(const RunConfig& config) {
  schema::Writer writer;
  schema::visit_fields(config, writer);
  return writer.json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::strict);
}

RunConfig run_config_from_json(std::string_view json) {
  const std::string name = "resolved configuration";
  return read(schema::parse_json(json, name), name, std::filesystem::current_path(), false);
}

std::string config_reference() {
  std::ostringstream out;
  out << "# Settings of a run\n\n"
         "Printed by `oomb config --reference` from the table in `configs/run_config.def`; a test compares them.\n\n"
         "A run file is YAML with these settings, all optional but where the last column asks for one. Relative paths "
         "are\n"
         "taken from the run file's folder. `--set section.field=value` on the command line overrides a setting.\n\n"
         "| Setting | Default | Allowed | Meaning |\n| --- | --- | --- | --- |\n";
  ReferencePrinter printer{out, ""};
  schema::visit_fields(static_cast<const RunConfig&>(RunConfig{}), printer);
  out << "\n## Settings of a topology\n\n"
         "The machines of a cluster, in the file that `topology.file` names; `configs/topologies/` has ready ones.\n\n"
         "| Setting | Default | Allowed | Meaning |\n| --- | --- | --- | --- |\n";
  schema::visit_fields(static_cast<const Topology&>(Topology{}), printer);
  return out.str();
}

}  // namespace oomb
