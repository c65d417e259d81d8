#include "configs/document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

namespace oomb::schema {
namespace {

constexpr std::size_t kMaxDepth = 16;
constexpr int kMaxNodes = 100'000;  // aliases may repeat a part of a small file very often
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;

// Control characters would break the one line of an error.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() <= 100 ? text : text.substr(0, 100) + "...";
}

// Builds the tree from the parser's events. yaml-cpp's own tree keeps both of two equal keys, loses the lines of absent
// values, and its loader of several documents never ends on some malformed texts.
class TreeBuilder : public YAML::EventHandler {
 public:
  // Without lines, `name` is the whole place (an override).
  TreeBuilder(std::string name, bool lines) : name_(std::move(name)), lines_(lines) {}

  // The document's tree; a null node when there was none.
  Node take() { return std::move(root_); }

  std::string at(const YAML::Mark& mark) const {
    return lines_ && !mark.is_null() ? name_ + ":" + std::to_string(mark.line + 1) : name_;
  }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (wants_key()) refuse_key(mark);
    add(leaf(mark, Node::Kind::kNull), anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (wants_key()) refuse_key(mark);
    const auto known = anchors_.find(anchor);
    if (known == anchors_.end()) fail(at(mark), path(), "a value that holds itself");
    count_ += size_of(known->second);
    check_size(mark);
    Node copy = known->second;
    copy.where = at(mark);
    add(std::move(copy), 0);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // Explicit tags such as !!int ask for a meaning that nobody here gives them.
    if (!tag.empty() && tag != "?" && tag != "!") fail(at(mark), path(), "tags are not supported");
    if (wants_key()) {
      start_entry(mark, value);
      return;
    }
    Node node = leaf(mark, Node::Kind::kScalar);
    node.scalar = value;
    node.quoted = tag == "!";
    add(std::move(node), anchor);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, Node::Kind::kList, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, Node::Kind::kMap, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    Node node;
    YAML::anchor_t anchor = 0;
    bool has_key = false;  // of a map: the next value belongs to `key`
    std::string key;
    std::string key_where;
  };

  // The parser takes the end of the text after an open bracket for such a key, too.
  [[noreturn]] void refuse_key(const YAML::Mark& mark) const {
    fail(at(mark), "", "not valid YAML (a key that is no text, or a bracket that is not closed)");
  }

  bool wants_key() const {
    return !stack_.empty() && stack_.back().node.kind == Node::Kind::kMap && !stack_.back().has_key;
  }

  // Of the value that comes next.
  std::string path() const {
    std::string text;
    for (const Open& open : stack_) {
      if (open.node.kind == Node::Kind::kList) {
        text += "[" + std::to_string(open.node.items.size()) + "]";
      } else if (open.has_key) {
        text += (text.empty() ? "" : ".") + printable(open.key);
      }
    }
    return text;
  }

  void check_size(const YAML::Mark& mark) const {
    if (count_ > kMaxNodes || stack_.size() > kMaxDepth) fail(at(mark), path(), "nested too deeply or too large");
  }

  static int size_of(const Node& node) {
    int count = 1;
    for (const Node& item : node.items) count += size_of(item);
    for (const auto& entry : node.entries) count += size_of(entry.second);
    return count;
  }

  Node leaf(const YAML::Mark& mark, Node::Kind kind) {
    ++count_;
    check_size(mark);
    Node node;
    node.kind = kind;
    node.where = at(mark);
    return node;
  }

  void open(const YAML::Mark& mark, Node::Kind kind, YAML::anchor_t anchor) {
    if (wants_key()) refuse_key(mark);
    stack_.push_back({leaf(mark, kind), anchor, false, "", ""});
  }

  void close() {
    Open done = std::move(stack_.back());
    stack_.pop_back();
    add(std::move(done.node), done.anchor);
  }

  void start_entry(const YAML::Mark& mark, const std::string& key) {
    Open& map = stack_.back();
    const Node* earlier = map.node.find(key);
    map.has_key = true;
    map.key = key;
    map.key_where = at(mark);
    if (earlier == nullptr) return;
    fail(map.key_where, path(), "duplicate key, already at " + earlier->where + "; allowed: each key once");
  }

  void add(Node node, YAML::anchor_t anchor) {
    if (anchor != 0) anchors_[anchor] = node;
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Open& parent = stack_.back();
    if (parent.node.kind == Node::Kind::kList) {
      parent.node.items.push_back(std::move(node));
      return;
    }
    node.where = parent.key_where;  // the line of the key is the one to look at
    parent.node.entries.emplace_back(std::move(parent.key), std::move(node));
    parent.has_key = false;
  }

  std::string name_;
  bool lines_;
  int count_ = 0;
  Node root_;
  std::vector<Open> stack_;
  std::map<YAML::anchor_t, Node> anchors_;
};

// The tree of the only document; a null node when there is none.
Node load_document(std::string_view text, const std::string& name, bool lines) {
  TreeBuilder builder(name, lines);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return Node{};
    Node root = builder.take();
    TreeBuilder rest(name, lines);
    if (!parser.HandleNextDocument(rest)) return root;
  } catch (const YAML::Exception& error) {
    fail(builder.at(error.mark), "", "not valid YAML (" + printable(error.msg) + ")");
  }
  fail(name, "", "not valid YAML, or more than one document of it; allowed: one");
}

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
  if (text.size() > kMaxBytes) fail(name, "", "too large for a settings file: more than 1 MiB");
  if (text.find('\0') != std::string_view::npos) fail(name, "", "not a text file");
  Node root = load_document(text, name, true);
  if (root.kind == Node::Kind::kNull) fail(name, "", "empty; allowed: a YAML map of settings");
  if (root.kind != Node::Kind::kMap) fail(name, "", "not a settings file; allowed: a YAML map of settings");
  return root;
}

Node parse_json(std::string_view text, const std::string& name) {
  if (text.size() > kMaxBytes) fail(name, "", "too large: more than 1 MiB");
  // Of two equal keys the JSON library keeps one; the events show both.
  std::vector<std::set<std::string>> open;
  std::string duplicate;
  const auto watch = [&](int depth, nlohmann::ordered_json::parse_event_t event, nlohmann::ordered_json& value) {
    using Event = nlohmann::ordered_json::parse_event_t;
    if (depth > static_cast<int>(kMaxDepth)) fail(name, "", "nested too deeply");
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
  Node value = load_document(value_text, where, false);
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
