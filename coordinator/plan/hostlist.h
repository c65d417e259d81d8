// Slurm's short form of node names: `gpu[01-03,7],login2` are gpu01, gpu02, gpu03, gpu7 and login2.
#pragma once

#include <string>
#include <vector>

namespace oomb::plan {

/// The names in order. InputError, naming `where`, for text that is no such list and for more than 65,536 names.
std::vector<std::string> expand_hostlist(const std::string& text, const std::string& where);

}  // namespace oomb::plan
