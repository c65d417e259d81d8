#include "configs/reader.h"

#include <cerrno>
#include <cstring>
#include <fstream>

namespace oomb::schema {

void refuse_unknown(const Node& node, const std::string& prefix, const std::string& key,
                    const std::vector<std::string>& names, const std::vector<std::string>& paths) {
  std::string shown = key.substr(0, 100);
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  std::string suggestion = nearest(key, names);
  if (suggestion.empty()) {  // perhaps the right name in the wrong place
    for (const std::string& path : paths) {
      if (path.ends_with("." + key)) suggestion = path;
    }
  } else {
    suggestion = join(prefix, suggestion);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  fail(node.where, join(prefix, shown),
       "unknown key" + (suggestion.empty() ? "" : ", did you mean " + suggestion + "?") + "; allowed: " + list);
}

std::string read_settings_file(const std::filesystem::path& file, const std::string& kind) {
  const std::string name = file.string();
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status)) throw InputError(name + ": no such " + kind + " file");
  if (std::filesystem::is_directory(status)) throw InputError(name + ": a folder; allowed: a YAML " + kind + " file");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw InputError(name + ": cannot be opened: " + std::strerror(errno));
  // Not more than needed to see that a file is too large: it may be a device without an end.
  std::string text((std::size_t{1} << 20) + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (stream.bad()) throw InputError(name + ": cannot be read");
  return text;
}

}  // namespace oomb::schema
