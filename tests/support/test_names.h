#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <string_view>

namespace convoy::test {

// Of a text what GoogleTest takes as a name: "put: in order" is PutInOrder.
inline std::string name_from(std::string_view text) {
  std::string name;
  bool begins_word = true;
  for (const char c : text) {
    const auto letter = static_cast<unsigned char>(c);
    if (std::isalnum(letter) != 0) {
      name += begins_word ? static_cast<char>(std::toupper(letter)) : c;
    }
    begins_word = std::isalnum(letter) == 0;
  }
  return name;
}

// INSTANTIATE_TEST_SUITE_P(Places, DeathTest, testing::Values("put: ready"), text_name);
// of a TestWithParam<std::string>. Not of a const char*: GoogleTest prints its address.
inline std::string text_name(const testing::TestParamInfo<std::string>& info) {
  return name_from(info.param);
}

}  // namespace convoy::test
