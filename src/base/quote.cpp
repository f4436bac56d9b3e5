#include "base/quote.h"

#include <array>
#include <cstdio>

namespace convoy {
namespace {

// Length of the UTF-8 sequence at the start of `text`; 0 if there is none.
std::size_t utf8_length(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  std::size_t length = 0;
  if (first < 0x80) {
    return 1;
  } else if (first >= 0xC2 && first < 0xE0) {
    length = 2;
  } else if (first >= 0xE0 && first < 0xF0) {
    length = 3;
  } else if (first >= 0xF0 && first < 0xF5) {
    length = 4;
  }
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return 0;
  }
  return length;
}

}  // namespace

std::string quote_json(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      out += "\\ufffd";
    } else if (text[0] == '"' || text[0] == '\\') {
      out += '\\';
      out += text[0];
    } else if (text[0] == '\n') {
      out += "\\n";
    } else if (first < 0x20) {
      std::array<char, 8> buffer{};
      std::snprintf(buffer.data(), buffer.size(), "\\u%04x", first);
      out += buffer.data();
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
  return out;
}

}  // namespace convoy
