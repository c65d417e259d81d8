// A parsed settings document: a tree that remembers where each part was written; private to configs/.
//
// YAML files, `--set` texts and JSON all become this tree, so one reader serves them.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "configs/error.h"

namespace oomb::schema {

struct Node {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string scalar;
  bool quoted = false;  // "8" and '8' are texts, 8 may be a number
  std::vector<Node> items;
  std::vector<std::pair<std::string, Node>> entries;  // in file order; keys are unique
  std::string where;                                  // FILE:LINE, or the override's text

  const Node* find(std::string_view key) const;
};

/// Throws InputError `where: path: problem`; the path is left out when empty.
[[noreturn]] void fail(const std::string& where, const std::string& path, const std::string& problem);

/// Whether a text is UTF-8: of a file or a path it need not be, of the JSON that settings become it must.
bool is_utf8(std::string_view text);

/// One YAML document whose top is a map. Refuses texts that are not UTF-8, duplicate keys, non-text keys, several
/// documents, nesting beyond 16 and texts above 1 MiB or 100,000 values. `name` stands for the file in errors.
Node parse_yaml(std::string_view text, const std::string& name);

/// The tree of a JSON object; `name` as above (JSON has no lines).
Node parse_json(std::string_view text, const std::string& name);

/// Applies `a.b=value` to the tree: the value, in YAML, replaces or adds that entry.
void apply_override(Node& root, const std::string& text);

}  // namespace oomb::schema
