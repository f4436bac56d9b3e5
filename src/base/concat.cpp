#include "base/concat.h"

namespace convoy {

std::string in_quotes(std::string_view text, std::size_t longest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      result += "\\x";
      result += kDigits[byte >> 4];
      result += kDigits[byte & 15];
    }
  }
  result += '\'';
  if (text.size() > longest) result += concat("... (", text.size(), " bytes)");
  return result;
}

}  // namespace convoy
