#pragma once

#include <string>
#include <string_view>

namespace convoy {

// `text` as a JSON string, quotes included. Bytes that are not UTF-8 become U+FFFD.
std::string quote_json(std::string_view text);

}  // namespace convoy
