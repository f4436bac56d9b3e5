// Types and signatures as texts.
#include <algorithm>
#include <array>
#include <cctype>

#include "base/error.h"
#include "base/quote.h"
#include "convoy/rpc_dynamic.h"

namespace convoy::rpc::dynamic {
namespace {

struct Number {
  std::string_view name;
  std::size_t bytes;
  bool is_signed;
};
constexpr std::array kIntegers = {
    Number{"char", 1, std::is_signed_v<char>}, Number{"signed char", 1, true},
    Number{"unsigned char", 1, false},         Number{"short", 2, true},
    Number{"unsigned short", 2, false},        Number{"int", 4, true},
    Number{"unsigned int", 4, false},          Number{"long", 8, true},
    Number{"unsigned long", 8, false},         Number{"long long", 8, true},
    Number{"unsigned long long", 8, false},
};

// Reads what Describer writes.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  ValueType read_type() {
    if (++depth_ > 100) fail_text("it is nested too deeply");
    ValueType type = read_one();
    --depth_;
    return type;
  }
  std::vector<ValueType> read_list(char close) {
    std::vector<ValueType> types;
    skip_spaces();
    if (take(close)) return types;
    while (true) {
      types.push_back(read_type());
      skip_spaces();
      if (take(close)) return types;
      expect(',');
    }
  }
  void expect(char c) {
    skip_spaces();
    if (!take(c)) fail_text("it has an unknown part");
  }
  void expect_end() {
    skip_spaces();
    if (at_ != text_.size()) fail_text("there is text after its end");
  }

 private:
  static constexpr std::string_view kAnonymous = "(anonymous namespace)";

  [[noreturn]] void fail_text(const char* why) const {
    fail(ErrorKind::kUnsupported, "rpc: the type ", in_quotes(text_, 300),
         " cannot be used here: ", why);
  }
  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool sees(std::string_view what) const { return text_.substr(at_).starts_with(what); }

  // Names, with spaces, scopes and template arguments.
  std::string read_name() {
    std::string name;
    while (at_ < text_.size()) {
      if (sees(kAnonymous)) {
        name += kAnonymous;
        at_ += kAnonymous.size();
        continue;
      }
      const char c = text_[at_];
      if (c == '<' && !is_template(name)) {
        const std::size_t begin = at_;
        skip_balanced();
        name += text_.substr(begin, at_ - begin);
        continue;
      }
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != ':' && c != ' ') {
        break;
      }
      name += c;
      ++at_;
    }
    while (!name.empty() && name.back() == ' ') {
      name.pop_back();
      --at_;  // the space between a result and its parameters
    }
    return name;
  }
  static bool is_template(std::string_view name) {
    return name == "std::vector" || name == "std::optional" || name == "std::map" ||
           name == "std::variant" || name == "convoy::RRef";
  }
  void skip_balanced() {
    int open = 0;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '<') ++open;
      if (c == '>' && --open == 0) return;
    }
    fail_text("a bracket is missing");
  }

  ValueType read_one() {
    using Is = ValueType::Kind;
    skip_spaces();
    if (!sees(kAnonymous) && take('(')) return {.kind = Is::kTuple, .parts = read_list(')')};
    std::string name = read_name();
    if (name == "void") return {.kind = Is::kVoid};
    if (name == "std::monostate") return {.kind = Is::kNothing};
    if (name == "bool") return {.kind = Is::kBool};
    if (name == "at::Tensor") return {.kind = Is::kTensor};
    if (name == "std::string") return {.kind = Is::kText};
    if (name == "float") return {.kind = Is::kReal, .name = name, .bytes = sizeof(float)};
    if (name == "double") return {.kind = Is::kReal, .name = name, .bytes = sizeof(double)};
    for (const Number& number : kIntegers) {
      if (name != number.name) continue;
      return {
          .kind = Is::kInteger, .name = name, .bytes = number.bytes, .is_signed = number.is_signed};
    }
    if (name == "std::vector") return read_vector();
    if (name == "std::optional") return read_template(Is::kOptional, 1);
    if (name == "std::map") return read_template(Is::kMap, 2);
    if (name == "std::variant") return read_template(Is::kVariant, 0);
    if (name == "convoy::RRef") return read_template(Is::kReference, 1);
    if (name.starts_with("object ")) return {.kind = Is::kObject, .name = name.substr(7)};
    if (name.empty()) fail_text("a type is missing");
    if (take('{')) return {.kind = Is::kStruct, .name = name, .parts = read_list('}')};
    fail_text("enumerations and recursive types are not supported");
  }
  // Of a list's items: otherwise any number of them fits into a message.
  static bool has_bytes(const ValueType& type) {
    const bool in_parts =
        type.kind == ValueType::Kind::kTuple || type.kind == ValueType::Kind::kStruct;
    return !in_parts || std::any_of(type.parts.begin(), type.parts.end(), has_bytes);
  }
  [[noreturn]] void fail_empty() const { fail_text("its items have no bytes"); }

  ValueType read_template(ValueType::Kind kind, std::size_t parts) {
    expect('<');
    ValueType type{.kind = kind, .parts = read_list('>')};
    if (parts != 0 && type.parts.size() != parts) fail_text("wrong number of template arguments");
    if (kind == ValueType::Kind::kMap && !has_bytes(type.parts[0])) fail_empty();
    return type;
  }
  // Those of numbers have the name that the compiler gives them.
  ValueType read_vector() {
    expect('<');
    skip_spaces();
    constexpr std::string_view kByte = "std::byte";
    if (sees(kByte)) {
      at_ += kByte.size();
      skip_allocator();
      return {.kind = ValueType::Kind::kBytes};
    }
    ValueType type{.kind = ValueType::Kind::kList, .parts = {read_type()}};
    skip_allocator();
    if (!has_bytes(type.parts[0])) fail_empty();
    return type;
  }
  void skip_allocator() {
    skip_spaces();
    if (take(',')) {
      skip_spaces();
      while (at_ < text_.size() && text_[at_] != '<') ++at_;
      skip_balanced();
    }
    expect('>');
  }

  const std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

std::string list_of(const std::vector<ValueType>& types, char open, char close) {
  std::string text(1, open);
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (i != 0) text += ", ";
    text += types[i].text();
  }
  return text + close;
}

}  // namespace

ValueType ValueType::parse(std::string_view text) {
  Reader reader(text);
  ValueType type = reader.read_type();
  reader.expect_end();
  return type;
}

std::string ValueType::text() const {
  switch (kind) {
    case Kind::kVoid: return "void";
    case Kind::kNothing: return "std::monostate";
    case Kind::kBool: return "bool";
    case Kind::kInteger:
    case Kind::kReal: return name;
    case Kind::kText: return "std::string";
    case Kind::kBytes: return "std::vector<std::byte, std::allocator<std::byte> >";
    case Kind::kTensor: return "at::Tensor";
    case Kind::kReference: return "convoy::RRef" + list_of(parts, '<', '>');
    case Kind::kList:
      if (const ValueType& item = parts.at(0);
          item.kind == Kind::kInteger || item.kind == Kind::kReal) {
        return "std::vector<" + item.name + ", std::allocator<" + item.name + "> >";
      }
      return "std::vector" + list_of(parts, '<', '>');
    case Kind::kOptional: return "std::optional" + list_of(parts, '<', '>');
    case Kind::kMap: return "std::map" + list_of(parts, '<', '>');
    case Kind::kVariant: return "std::variant" + list_of(parts, '<', '>');
    case Kind::kTuple: return list_of(parts, '(', ')');
    case Kind::kStruct: return name + list_of(parts, '{', '}');
    case Kind::kObject: return "object " + name;
  }
  return {};
}

Signature Signature::parse(std::string_view text) {
  Reader reader(text);
  Signature signature;
  signature.result = reader.read_type();
  reader.expect('(');
  signature.parameters = reader.read_list(')');
  reader.expect_end();
  return signature;
}

std::string Signature::text() const { return result.text() + ' ' + list_of(parameters, '(', ')'); }

}  // namespace convoy::rpc::dynamic
