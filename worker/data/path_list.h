// From the paths a user writes (files, folders, globs) to one list of files.
#pragma once

#include <string>
#include <vector>

namespace oomb::data {

/// Expands every entry of `paths` and returns the files sorted by the bytes of their paths, each file once (two names
/// of one inode count once, the first in order is kept), so the same tree gives the same corpus on every machine.
/// - file: taken whatever its extension;
/// - folder: all regular files under it, recursively, following symbolic links (loops are entered once); names that
/// start
///   with '.' and links that lead nowhere are passed over; with `extensions` (".h", "txt": the dot is optional; ""
///   matches files without one) only those files;
/// - glob: an entry that names nothing itself and contains '*', '?' or '['; its matches are treated as above.
/// Throws InputError naming the entry that matches nothing, or the folder that cannot be read.
std::vector<std::string> expand_paths(const std::vector<std::string>& paths,
                                      const std::vector<std::string>& extensions = {});

}  // namespace oomb::data
