#include "launch/json.h"

#include <charconv>
#include <cstdint>

namespace convoy::launch {
namespace {

constexpr int kMaxDepth = 64;

void append_utf8(std::string& out, std::uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

// Every function returns false (and leaves the rest undefined) where the text is not JSON.
class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  bool document(Json& out) {
    if (!value(out, 0)) return false;
    skip_space();
    return rest_.empty();
  }

 private:
  void skip_space() {
    const auto at = rest_.find_first_not_of(" \t\r\n");
    rest_.remove_prefix(at == std::string_view::npos ? rest_.size() : at);
  }
  bool take(std::string_view token) {
    skip_space();
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }

  bool value(Json& out, int depth) {
    if (depth > kMaxDepth) return false;
    if (take("{")) return object(out, depth);
    if (take("[")) return array(out, depth);
    if (take("\"")) return string(out.value.emplace<std::string>());
    if (take("true")) return (out.value = true, true);
    if (take("false")) return (out.value = false, true);
    if (take("null")) return (out.value = nullptr, true);
    return number(out);
  }

  bool number(Json& out) {
    double parsed = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), parsed);
    if (error != std::errc()) return false;
    out.value = parsed;
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return true;
  }

  bool array(Json& out, int depth) {
    auto& items = out.value.emplace<Json::Array>();
    if (take("]")) return true;
    do {
      if (!value(items.emplace_back(), depth + 1)) return false;
    } while (take(","));
    return take("]");
  }

  bool object(Json& out, int depth) {
    auto& members = out.value.emplace<Json::Object>();
    if (take("}")) return true;
    do {
      std::string name;
      if (!take("\"") || !string(name) || !take(":")) return false;
      if (!value(members[name], depth + 1)) return false;
    } while (take(","));
    return take("}");
  }

  // Behind the opening quote.
  bool string(std::string& out) {
    for (;;) {
      const auto at = rest_.find_first_of("\"\\");
      if (at == std::string_view::npos) return false;
      out.append(rest_.substr(0, at));
      const char found = rest_[at];
      rest_.remove_prefix(at + 1);
      if (found == '"') return true;
      if (!escape(out)) return false;
    }
  }

  bool escape(std::string& out) {
    if (rest_.empty()) return false;
    const char letter = rest_[0];
    rest_.remove_prefix(1);
    switch (letter) {
      case '"':
      case '\\':
      case '/': out += letter; return true;
      case 'b': out += '\b'; return true;
      case 'f': out += '\f'; return true;
      case 'n': out += '\n'; return true;
      case 'r': out += '\r'; return true;
      case 't': out += '\t'; return true;
      case 'u': return unicode(out);
      default: return false;
    }
  }

  bool hex4(std::uint32_t& code) {
    if (rest_.size() < 4) return false;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + 4, code, 16);
    if (error != std::errc() || end != rest_.data() + 4) return false;
    rest_.remove_prefix(4);
    return true;
  }

  bool unicode(std::string& out) {
    std::uint32_t code = 0;
    if (!hex4(code)) return false;
    if (code >= 0xD800 && code < 0xDC00 && rest_.starts_with("\\u")) {
      std::uint32_t low = 0;
      rest_.remove_prefix(2);
      if (!hex4(low)) return false;
      code = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                                           : 0xFFFD;
    }
    append_utf8(out, code >= 0xD800 && code < 0xE000 ? 0xFFFD : code);
    return true;
  }

  std::string_view rest_;
};

}  // namespace

std::optional<Json> Json::parse(std::string_view text) {
  Json result;
  if (!Parser(text).document(result)) return std::nullopt;
  return result;
}

const Json* Json::member(const std::string& name) const {
  const auto* object = std::get_if<Object>(&value);
  if (!object) return nullptr;
  const auto found = object->find(name);
  return found == object->end() ? nullptr : &found->second;
}

}  // namespace convoy::launch
