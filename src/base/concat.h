#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace convoy {

// The parts, streamed one after another. (GCC 12 has no <format>, and fmt is libtorch's.)
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// Text from outside, fit for one line of an error or a log: in quotes, without control characters
// and non-ASCII bytes (as \xNN), cut when long. (Not `quoted`: where <iomanip> is visible, a call
// with a std::string would silently find std::quoted, by its argument.)
std::string in_quotes(std::string_view text, std::size_t longest = 80);

}  // namespace convoy
