#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"

namespace convoy {

// Appends the bytes of a number as they lie in memory: for readers on this host.
template <class T>
void put_bytes(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes numbers and bytes from the front of what another process wrote, which may be anything.
class ByteReader {
 public:
  // `what` stands in errors: "this is no <what>: it is cut off" (kInvalidArgument).
  ByteReader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::size_t length) {
    if (length > bytes_.size()) bad("it is cut off");
    const auto front = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return front;
  }
  std::size_t left() const { return bytes_.size(); }

  [[noreturn]] void bad(const char* why) const {
    fail(ErrorKind::kInvalidArgument, "this is no ", what_, ": ", why);
  }

 private:
  std::string_view bytes_;
  const char* what_;
};

}  // namespace convoy
