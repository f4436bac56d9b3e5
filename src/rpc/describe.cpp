#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "convoy/detail/rpc_signature.h"
#include "convoy/detail/rpc_values.h"

namespace convoy::rpc::detail {

void Describer::name(const std::type_info& type) {
  if (type == typeid(std::string)) {
    text_ += "std::string";  // its full name differs between libraries
    return;
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  text_ += text ? text.get() : type.name();
}

bool Describer::enter(const std::type_info& type) {
  const bool inside = std::any_of(inside_.begin(), inside_.end(),
                                  [&](const std::type_info* other) { return *other == type; });
  if (inside) return false;
  inside_.push_back(&type);
  return true;
}

std::string to_text(const Body& body) {
  std::string text(body.bytes, '\0');
  body.write(body.values, reinterpret_cast<std::byte*>(text.data()), text.size());
  return text;
}

}  // namespace convoy::rpc::detail
