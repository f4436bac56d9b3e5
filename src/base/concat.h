#pragma once

#include <sstream>
#include <string>

namespace convoy {

// The parts, streamed one after another. (GCC 12 has no <format>, and fmt is libtorch's.)
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace convoy
