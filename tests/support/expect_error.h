#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace convoy::test {

// The convoy::Error that `function` throws; any other exception passes on.
template <class Function>
std::optional<Error> error_of(Function&& function) {
  try {
    function();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// Fails the test unless `function` throws a convoy::Error of this kind whose text holds `part`.
template <class Function>
void expect_error(ErrorKind kind, std::string_view part, Function&& function) {
  const auto error = error_of(function);
  if (!error) {
    ADD_FAILURE() << "expected an error (" << to_string(kind) << ") with '" << part
                  << "', but nothing was thrown";
    return;
  }
  EXPECT_EQ(to_string(error->kind()), to_string(kind)) << error->what();
  EXPECT_NE(std::string_view(error->what()).find(part), std::string_view::npos)
      << "expected '" << part << "' in: " << error->what();
}

}  // namespace convoy::test
