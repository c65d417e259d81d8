// The error a user can do something about.
#pragma once

#include <stdexcept>
#include <string>

namespace oomb {

/// Bad input or an environment that cannot serve it. `what()` is one line that says what is wrong, where (file, line,
/// YAML path, tensor), and what would be right. Programs print it and exit with status 2; nothing has been lost.
/// Broken invariants of our own are not InputErrors.
class InputError : public std::runtime_error {
 public:
  explicit InputError(const std::string& message) : std::runtime_error(message) {}
};

}  // namespace oomb
