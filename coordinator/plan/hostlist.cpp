#include "coordinator/plan/hostlist.h"

#include <charconv>
#include <cstdint>

#include "configs/error.h"

namespace oomb::plan {
namespace {

constexpr std::size_t kMaxNames = 65'536;

class Expander {
 public:
  Expander(const std::string& text, const std::string& where) : text_(text), where_(where) {}

  std::vector<std::string> expand() {
    std::vector<std::string> names;
    std::size_t begin = 0, depth = 0;
    for (std::size_t i = 0; i <= text_.size(); ++i) {
      const char c = i < text_.size() ? text_[i] : ',';
      if (c == '[') ++depth;
      if (c == ']' && depth-- == 0) fail();
      if (depth > 1) fail();
      if (c != ',' || (depth > 0 && i < text_.size())) continue;
      if (i == begin || depth > 0) fail();
      add("", text_.substr(begin, i - begin), names);
      begin = i + 1;
    }
    return names;
  }

 private:
  [[noreturn]] void fail() const {
    throw InputError(where_ + "=" + text_.substr(0, 100) + ": not a list of nodes; allowed: such as gpu[01-03,7],gpu9");
  }

  void add(const std::string& head, const std::string& rest, std::vector<std::string>& names) const {
    const std::size_t open = rest.find('[');
    if (open == std::string::npos) {
      if (names.size() == kMaxNames) fail();
      names.push_back(head + rest);
      return;
    }
    const std::size_t close = rest.find(']', open);
    const std::string ranges = rest.substr(open + 1, close - open - 1), tail = rest.substr(close + 1);
    for (std::size_t begin = 0; begin <= ranges.size();) {
      const std::size_t comma = std::min(ranges.find(',', begin), ranges.size());
      const std::string range = ranges.substr(begin, comma - begin);
      const std::size_t dash = range.find('-');
      const std::string first = range.substr(0, dash);
      const std::int64_t low = number(first), high = dash == std::string::npos ? low : number(range.substr(dash + 1));
      if (high < low || high - low >= static_cast<std::int64_t>(kMaxNames)) fail();
      for (std::int64_t i = low; i <= high; ++i) {
        std::string digits = std::to_string(i);
        if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
        add(head + rest.substr(0, open) + digits, tail, names);
      }
      begin = comma + 1;
    }
  }

  std::int64_t number(const std::string& digits) const {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || digits[0] == '-') fail();
    return value;
  }

  const std::string& text_;
  const std::string& where_;
};

}  // namespace

std::vector<std::string> expand_hostlist(const std::string& text, const std::string& where) {
  return Expander(text, where).expand();
}

}  // namespace oomb::plan
