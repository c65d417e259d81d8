#include "configs/run_config.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "configs/check_rules.h"
#include "configs/document.h"
#include "configs/schema.h"
#include "configs/values.h"

namespace oomb {
namespace {

using schema::FieldInfo;
using schema::Node;

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

// The names of one section, to be compared with what a document says.
struct NameCollector {
  std::vector<std::string> names;
  template <typename T>
  void field(const T&, const FieldInfo& info) {
    names.push_back(info.name);
  }
  template <typename S>
  void section(const S&, const char* name, const char*) {
    names.push_back(name);
  }
};

// The full paths of all fields, for suggestions.
struct PathCollector {
  std::string prefix;
  std::vector<std::string> paths;
  template <typename T>
  void field(const T&, const FieldInfo& info) {
    paths.push_back(join(prefix, info.name));
  }
  template <typename S>
  void section(const S& object, const char* name, const char*) {
    PathCollector inner{join(prefix, name), {}};
    schema::visit_fields(object, inner);
    paths.insert(paths.end(), inner.paths.begin(), inner.paths.end());
  }
};

[[noreturn]] void refuse_unknown(const Node& node, const std::string& prefix, const std::string& key,
                                 const std::vector<std::string>& names) {
  std::string shown = key.substr(0, 100);
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  std::string suggestion = schema::nearest(key, names);
  if (suggestion.empty()) {  // perhaps the right name in the wrong place
    PathCollector all;
    schema::visit_fields(static_cast<const RunConfig&>(RunConfig{}), all);
    for (const std::string& path : all.paths) {
      if (path.ends_with("." + key)) suggestion = path;
    }
  } else {
    suggestion = join(prefix, suggestion);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  schema::fail(node.where, join(prefix, shown),
               "unknown key" + (suggestion.empty() ? "" : ", did you mean " + suggestion + "?") + "; allowed: " + list);
}

// Fills an object from a tree and notes where each field was written.
struct Reader {
  const Node& map;
  std::string prefix;
  const std::filesystem::path& folder;
  schema::Places& places;

  void check_names(const auto& object) const {
    NameCollector known;
    schema::visit_fields(object, known);
    for (const auto& [key, node] : map.entries) {
      if (std::find(known.names.begin(), known.names.end(), key) == known.names.end()) {
        refuse_unknown(node, prefix, key, known.names);
      }
    }
  }

  template <typename T>
  void field(T& value, const FieldInfo& info) {
    const Node* node = map.find(info.name);
    if (node == nullptr) return;
    const std::string path = join(prefix, info.name);
    schema::parse(*node, info.limits, {path, folder}, value);
    places.written[path] = node->where;
  }

  template <typename S>
  void section(S& object, const char* name, const char*) {
    const Node* node = map.find(name);
    if (node == nullptr || node->kind == Node::Kind::kNull) return;  // `train:` with nothing under it
    const std::string path = join(prefix, name);
    if (node->kind != Node::Kind::kMap) schema::refuse(*node, path, "a map of settings");
    Reader inner{*node, path, folder, places};
    inner.check_names(object);
    schema::visit_fields(object, inner);
  }
};

struct Writer {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  template <typename T>
  void field(const T& value, const FieldInfo& info) {
    json[info.name] = schema::write(value);
  }
  template <typename S>
  void section(const S& object, const char* name, const char*) {
    Writer inner;
    schema::visit_fields(object, inner);
    json[name] = std::move(inner.json);
  }
};

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
  Reader reader{root, "", folder, places};
  reader.check_names(config);
  schema::visit_fields(config, reader);
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
  if (!schema::is_utf8(folder.native())) schema::fail(name, "", "the path of its folder is not UTF-8");
  for (const std::string& text : overrides) schema::apply_override(root, text);
  return read(root, name, folder, true);
}

RunConfig load_run_config(const std::filesystem::path& file, std::span<const std::string> overrides) {
  const std::string name = file.string();
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status)) throw InputError(name + ": no such run file");
  if (std::filesystem::is_directory(status)) throw InputError(name + ": a folder; allowed: a YAML run file");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw InputError(name + ": cannot be opened: " + std::strerror(errno));
  // Not more than needed to see that a file is too large: it may be a device without an end.
  std::string text((std::size_t{1} << 20) + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (stream.bad()) throw InputError(name + ": cannot be read");
  return parse_run_config(text, name, std::filesystem::absolute(file).parent_path().lexically_normal(), overrides);
}

std::string to_json(const RunConfig& config) {
  Writer writer;
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
  return out.str();
}

}  // namespace oomb
