#pragma once

#include <string>

namespace convoy::test {

// The file of the running test program; works although it may have been replaced meanwhile.
std::string this_program();
// A program that was built into the same folder.
std::string sibling_program(const std::string& name);

}  // namespace convoy::test
