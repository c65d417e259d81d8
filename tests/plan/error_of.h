// The message of the InputError that an action throws.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "configs/error.h"

namespace oomb::plan {

/// Checks that it is one line; "no error" if nothing is thrown.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "no error";
}

}  // namespace oomb::plan
