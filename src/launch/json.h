#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/quote.h"

namespace convoy::launch {

// A JSON value: just what the launcher needs to read a rank's error file and to write the doctor's
// findings.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, double, std::string, Array, Object> value = nullptr;

  // nullopt unless `text` is one whole JSON value, nested at most 64 deep.
  static std::optional<Json> parse(std::string_view text);

  // The member of an object; nullptr if this is no object or has none of that name.
  const Json* member(const std::string& name) const;
  // nullptr if this is no string.
  const std::string* text() const { return std::get_if<std::string>(&value); }
};

using convoy::quote_json;

}  // namespace convoy::launch
