// Typed structs out of a settings document, and back to JSON, by the visitors of schema.h; private to configs/.
#pragma once

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "configs/check_rules.h"
#include "configs/document.h"
#include "configs/schema.h"
#include "configs/values.h"

namespace oomb::schema {

inline std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

/// The names of one section, to be compared with what a document says.
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

/// The full paths of all fields, for suggestions.
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
    visit_fields(object, inner);
    paths.insert(paths.end(), inner.paths.begin(), inner.paths.end());
  }
};

/// Throws the error of a key that is no setting: `names` are those of its section, `paths` all settings there are.
[[noreturn]] void refuse_unknown(const Node& node, const std::string& prefix, const std::string& key,
                                 const std::vector<std::string>& names, const std::vector<std::string>& paths);

/// Fills an object from a tree and notes where each field was written.
struct Reader {
  const Node& map;
  std::string prefix;
  const std::filesystem::path& folder;
  const std::vector<std::string>& paths;  // all settings there are
  Places& places;

  void check_names(const auto& object) const {
    NameCollector known;
    visit_fields(object, known);
    for (const auto& [key, node] : map.entries) {
      if (std::find(known.names.begin(), known.names.end(), key) == known.names.end()) {
        refuse_unknown(node, prefix, key, known.names, paths);
      }
    }
  }

  template <typename T>
  void field(T& value, const FieldInfo& info) {
    const Node* node = map.find(info.name);
    if (node == nullptr) return;
    const std::string path = join(prefix, info.name);
    parse(*node, info.limits, {path, folder}, value);
    places.written[path] = node->where;
  }

  template <typename S>
  void section(S& object, const char* name, const char*) {
    const Node* node = map.find(name);
    if (node == nullptr || node->kind == Node::Kind::kNull) return;  // `train:` with nothing under it
    const std::string path = join(prefix, name);
    if (node->kind != Node::Kind::kMap) refuse(*node, path, "a map of settings");
    Reader inner{*node, path, folder, paths, places};
    inner.check_names(object);
    visit_fields(object, inner);
  }
};

/// Fills `object` from the document's tree.
template <typename S>
void read_settings(const Node& root, const std::filesystem::path& folder, Places& places, S& object) {
  PathCollector all;
  visit_fields(static_cast<const S&>(object), all);
  Reader reader{root, "", folder, all.paths, places};
  reader.check_names(object);
  visit_fields(object, reader);
}

/// The JSON form of an object, in the order of its table.
struct Writer {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  template <typename T>
  void field(const T& value, const FieldInfo& info) {
    json[info.name] = write(value);
  }
  template <typename S>
  void section(const S& object, const char* name, const char*) {
    Writer inner;
    visit_fields(object, inner);
    json[name] = std::move(inner.json);
  }
};

/// The text of a settings file; InputError naming it when it cannot be read. Reads little more than parse_yaml takes.
std::string read_settings_file(const std::filesystem::path& file, const std::string& kind);

}  // namespace oomb::schema
