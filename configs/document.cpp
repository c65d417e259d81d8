#include "configs/document.h"

#include <yaml-cpp/yaml.h>

#include <nlohmann/json.hpp>
#include <set>

namespace oomb::schema {
namespace {

constexpr int kMaxDepth = 16;
constexpr int kMaxNodes = 100'000;  // aliases may repeat a part of a small file very often
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;

std::string join(const std::string& path, const std::string& key) { return path.empty() ? key : path + "." + key; }

// Control characters would break the one line of an error.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() <= 100 ? text : text.substr(0, 100) + "...";
}

class YamlConverter {
 public:
  // Without lines, `name` is the whole place (an override).
  YamlConverter(std::string name, bool lines) : name_(std::move(name)), lines_(lines) {}

  Node convert(const YAML::Node& yaml, const std::string& path, const std::string& parent_where, int depth) {
    Node node;
    node.where = yaml.Mark().is_null() ? parent_where : at(yaml.Mark());
    if (depth > kMaxDepth || ++count_ > kMaxNodes) fail(node.where, path, "nested too deeply or too large");
    switch (yaml.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        node.kind = Node::Kind::kScalar;
        node.scalar = yaml.Scalar();
        node.quoted = yaml.Tag() == "!";
        // Explicit tags such as !!int ask for a meaning that nobody here gives them.
        if (!node.quoted && yaml.Tag() != "?" && !yaml.Tag().empty()) fail(node.where, path, "tags are not supported");
        break;
      case YAML::NodeType::Sequence:
        node.kind = Node::Kind::kList;
        for (std::size_t i = 0; i < yaml.size(); ++i) {
          node.items.push_back(convert(yaml[i], path + "[" + std::to_string(i) + "]", node.where, depth + 1));
        }
        break;
      case YAML::NodeType::Map:
        node.kind = Node::Kind::kMap;
        convert_map(yaml, path, depth, node);
        break;
    }
    return node;
  }

  std::string at(const YAML::Mark& mark) const { return lines_ ? name_ + ":" + std::to_string(mark.line + 1) : name_; }

 private:
  void convert_map(const YAML::Node& yaml, const std::string& path, int depth, Node& node) {
    std::set<std::string> seen;  // yaml-cpp keeps both of two equal keys
    for (const auto& entry : yaml) {
      const std::string where = entry.first.Mark().is_null() ? node.where : at(entry.first.Mark());
      if (!entry.first.IsScalar()) fail(where, path, "a key that is not a text");
      const std::string key = entry.first.Scalar();
      const std::string key_path = join(path, printable(key));
      if (!seen.insert(key).second) {
        fail(where, key_path, "duplicate key, already at " + node.find(key)->where + "; allowed: each key once");
      }
      Node value = convert(entry.second, key_path, where, depth + 1);
      value.where = where;  // the line of the key is the one to look at
      node.entries.emplace_back(key, std::move(value));
    }
  }

  std::string name_;
  bool lines_;
  int count_ = 0;
};

Node convert_json(const nlohmann::ordered_json& json, const std::string& where) {
  Node node;
  node.where = where;
  if (json.is_object()) {
    node.kind = Node::Kind::kMap;
    for (const auto& [key, value] : json.items()) node.entries.emplace_back(key, convert_json(value, where));
  } else if (json.is_array()) {
    node.kind = Node::Kind::kList;
    for (const auto& value : json) node.items.push_back(convert_json(value, where));
  } else if (json.is_string()) {
    node.kind = Node::Kind::kScalar;
    node.scalar = json.get<std::string>();
    node.quoted = true;
  } else if (!json.is_null()) {
    node.kind = Node::Kind::kScalar;
    node.scalar = json.dump();
  }
  return node;
}

std::vector<YAML::Node> load_all(std::string_view text, const std::string& name, bool lines) {
  try {
    return YAML::LoadAll(std::string(text));
  } catch (const YAML::Exception& error) {
    const std::string line = lines && !error.mark.is_null() ? ":" + std::to_string(error.mark.line + 1) : "";
    fail(name + line, "", "not valid YAML (" + printable(error.msg) + ")");
  }
}

}  // namespace

const Node* Node::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

void fail(const std::string& where, const std::string& path, const std::string& problem) {
  throw InputError(where + ": " + (path.empty() ? "" : path + ": ") + problem);
}

Node parse_yaml(std::string_view text, const std::string& name) {
  if (text.size() > kMaxBytes) fail(name, "", "too large for a run file: more than 1 MiB");
  if (text.find('\0') != std::string_view::npos) fail(name, "", "not a text file");
  const std::vector<YAML::Node> documents = load_all(text, name, true);
  if (documents.empty() || (documents.size() == 1 && documents[0].IsNull())) {
    fail(name, "", "empty; allowed: a YAML map of settings");
  }
  if (documents.size() > 1) fail(name, "", "several YAML documents; allowed: one");
  if (!documents[0].IsMap()) fail(name, "", "not a run file; allowed: a YAML map of settings");
  return YamlConverter(name, true).convert(documents[0], "", name, 0);
}

Node parse_json(std::string_view text, const std::string& name) {
  if (text.size() > kMaxBytes) fail(name, "", "too large: more than 1 MiB");
  // Of two equal keys the JSON library keeps one; the events show both.
  std::vector<std::set<std::string>> open;
  std::string duplicate;
  const auto watch = [&](int depth, nlohmann::ordered_json::parse_event_t event, nlohmann::ordered_json& value) {
    using Event = nlohmann::ordered_json::parse_event_t;
    if (depth > kMaxDepth) fail(name, "", "nested too deeply");
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !open.back().insert(value.get<std::string>()).second)
      duplicate = value.get<std::string>();
    return true;
  };
  nlohmann::ordered_json json;
  try {
    json = nlohmann::ordered_json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    fail(name, "", "not valid JSON (" + printable(error.what()) + ")");
  }
  if (!duplicate.empty()) fail(name, printable(duplicate), "duplicate key; allowed: each key once");
  if (!json.is_object()) fail(name, "", "not an object of settings");
  return convert_json(json, name);
}

void apply_override(Node& root, const std::string& text) {
  const std::string where = "--set " + printable(text);
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) fail(where, "", "not an override; allowed: section.field=value");
  const std::string path = text.substr(0, equals);
  const std::string_view value_text = std::string_view(text).substr(equals + 1);
  const std::vector<YAML::Node> documents = load_all(value_text, where, false);
  if (documents.size() > 1) fail(where, printable(path), "several values; allowed: one");
  Node value;
  if (!documents.empty()) value = YamlConverter(where, false).convert(documents[0], path, where, 1);
  value.where = where;

  Node* map = &root;
  for (std::size_t begin = 0;;) {
    const std::size_t dot = path.find('.', begin);
    const std::string key = path.substr(begin, dot == std::string::npos ? dot : dot - begin);
    if (key.empty()) fail(where, "", "not an override; allowed: section.field=value");
    Node* entry = nullptr;
    for (auto& [name, node] : map->entries) {
      if (name == key) entry = &node;
    }
    if (entry == nullptr) entry = &map->entries.emplace_back(key, Node{.where = where}).second;
    if (dot == std::string::npos) {
      *entry = std::move(value);
      return;
    }
    if (entry->kind != Node::Kind::kMap) *entry = Node{.kind = Node::Kind::kMap, .where = where};
    map = entry;
    begin = dot + 1;
  }
}

}  // namespace oomb::schema
