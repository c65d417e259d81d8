#include "worker/data/path_list.h"

#include <dirent.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "configs/error.h"

namespace oomb::data {
namespace {

using Inode = std::pair<uint64_t, uint64_t>;

Inode inode_of(const struct stat& info) { return {info.st_dev, info.st_ino}; }

std::string cause(int error) { return std::generic_category().message(error); }

bool has_extension(std::string_view path, const std::vector<std::string>& extensions) {
  if (extensions.empty()) return true;
  const std::string_view name = path.substr(path.rfind('/') + 1);
  const size_t dot = name.rfind('.');
  const std::string_view have = dot == std::string_view::npos ? std::string_view() : name.substr(dot + 1);
  return std::any_of(extensions.begin(), extensions.end(), [&](std::string_view wanted) {
    if (!wanted.empty() && wanted.front() == '.') wanted.remove_prefix(1);
    return have == wanted;
  });
}

class Expansion {
 public:
  explicit Expansion(const std::vector<std::string>& extensions) : extensions_(extensions) {}

  void add_entry(const std::string& entry) {
    if (entry.empty()) throw InputError("data path is empty: name a file, a folder or a glob");
    const size_t before = found_.size();
    struct stat info {};
    if (::stat(entry.c_str(), &info) == 0) {
      add_existing(entry, info);
      if (found_.size() == before) {
        throw InputError(entry + ": the folder holds no data file" +
                         (extensions_.empty() ? std::string() : " with one of the wanted extensions"));
      }
      return;
    }
    const int error = errno;
    if (entry.find_first_of("*?[") == std::string::npos) {
      throw InputError(entry + ": cannot be read: " + cause(error));
    }
    add_glob(entry);
    if (found_.size() == before) throw InputError(entry + ": the pattern matches no data file");
  }

  std::vector<std::string> take() {
    std::sort(found_.begin(), found_.end());
    std::set<Inode> seen;
    std::vector<std::string> files;
    for (auto& [path, inode] : found_) {
      if (seen.insert(inode).second) files.push_back(std::move(path));
    }
    return files;
  }

 private:
  void add_existing(const std::string& path, const struct stat& info) {
    if (S_ISDIR(info.st_mode)) {
      std::set<Inode> entered;
      walk(path, info, entered);
    } else {
      found_.emplace_back(path, inode_of(info));
    }
  }

  void add_glob(const std::string& pattern) {
    glob_t matches{};
    const int status = ::glob(pattern.c_str(), 0, nullptr, &matches);
    std::unique_ptr<glob_t, void (*)(glob_t*)> guard(&matches, ::globfree);
    if (status == GLOB_NOMATCH) return;
    if (status != 0) throw InputError(pattern + ": the pattern cannot be expanded");
    for (size_t i = 0; i < matches.gl_pathc; ++i) {
      struct stat info {};
      if (::stat(matches.gl_pathv[i], &info) == 0) add_existing(matches.gl_pathv[i], info);
    }
  }

  void walk(const std::string& root, const struct stat& root_info, std::set<Inode>& entered) {
    // An explicit stack: the depth of a tree is not ours to bound.
    entered.insert(inode_of(root_info));
    std::vector<std::string> folders{root};
    while (!folders.empty()) {
      const std::string folder = std::move(folders.back());
      folders.pop_back();
      std::vector<std::string> below;
      for (const std::string& name : list(folder)) {
        std::string path = folder.back() == '/' ? folder + name : folder + '/' + name;
        struct stat info {};
        if (::stat(path.c_str(), &info) != 0) {
          const int error = errno;
          struct stat link {};
          if (::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode)) continue;
          throw InputError(path + ": cannot be read: " + cause(error));
        }
        if (S_ISDIR(info.st_mode)) {
          if (entered.insert(inode_of(info)).second) below.push_back(std::move(path));
        } else if (S_ISREG(info.st_mode) && has_extension(path, extensions_)) {
          found_.emplace_back(std::move(path), inode_of(info));
        }
      }
      // Depth first in name order, so that a folder with two names is entered by the same one everywhere.
      folders.insert(folders.end(), std::make_move_iterator(below.rbegin()), std::make_move_iterator(below.rend()));
    }
  }

  static std::vector<std::string> list(const std::string& folder) {
    std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(folder.c_str()), ::closedir);
    if (dir == nullptr) throw InputError(folder + ": the folder cannot be read: " + cause(errno));
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(dir.get());
      if (entry == nullptr) break;
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    }
    if (errno != 0) throw InputError(folder + ": the folder cannot be read: " + cause(errno));
    std::sort(names.begin(), names.end());
    return names;
  }

  const std::vector<std::string>& extensions_;
  std::vector<std::pair<std::string, Inode>> found_;
};

}  // namespace

std::vector<std::string> expand_paths(const std::vector<std::string>& paths,
                                      const std::vector<std::string>& extensions) {
  if (paths.empty()) throw InputError("no data path given: name files, folders or globs");
  Expansion expansion(extensions);
  for (const std::string& entry : paths) expansion.add_entry(entry);
  return expansion.take();
}

}  // namespace oomb::data
