#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "convoy/error.h"
#include "convoy/fields.h"
#include "convoy/share.h"

// Converts C++ values to values of a message, and back. Arguments and results of other processes
// are passed this way.
//
// These types can be passed: numbers, enumerators, std::string, Bytes, tensors (shared, not copied)
// and the other values of a message; vectors, maps, optionals, variants, pairs, arrays and tuples
// of them; shared objects (Queue, Published, Slots), which are the same object in the other
// process; and your own types that name their fields (convoy/fields.h).
namespace convoy::share {

class ValueReader;

namespace detail {

// Types that a message holds directly.
template <class T, class V>
inline constexpr bool kIsAlternative = false;
template <class T, class... Kinds>
inline constexpr bool kIsAlternative<T, std::variant<Kinds...>> = (std::same_as<T, Kinds> || ...);
// Objects that are passed by handle: Queue, Published.
template <class T>
concept PassedByHandle = requires(const T& value, Message& to, ValueReader& from) {
  value.put_values(to);
  { T::take_values(from) } -> std::same_as<T>;
};
template <class T>
inline constexpr bool kHeld =
    std::same_as<T, Value> || kIsAlternative<T, Value> || PassedByHandle<T>;

// Adapts a message to a sink of convoy/fields.h.
class MessageSink {
 public:
  template <class T>
  static constexpr bool kHolds = kHeld<T>;

  explicit MessageSink(Message& to) : to_(to) {}

  template <class T>
  void add(const T& value) {
    if constexpr (PassedByHandle<T>) {
      value.put_values(to_);
    } else {
      to_.add(value);
    }
  }
  void add_text(std::string_view text) { to_.add(std::string(text)); }
  void add_unsigned(std::uint64_t value);  // throws kInvalidArgument if it needs 64 bits

 private:
  Message& to_;
};

}  // namespace detail

// Appends values to a message. Throws kInvalidArgument for an unsigned number that does not fit.
template <class... T>
void put(Message& to, const T&... values) {
  detail::MessageSink sink(to);
  (convoy::detail::put_value(sink, values), ...);
}

// Takes values from a message, in order. Throws kInvalidArgument if a value is missing or has
// another type. Keeps a reference to the message. A source of convoy/fields.h. Not thread-safe.
class ValueReader {
 public:
  template <class T>
  static constexpr bool kHolds = detail::kHeld<T>;

  explicit ValueReader(const Message& message, std::size_t first = 0)
      : message_(message), next_(first) {}

  bool at_end() const { return next_ >= message_.size(); }
  std::size_t next() const { return next_; }

  template <class T>
  T take() {
    return convoy::detail::take_value<T>(*this);
  }

  template <class T>
  T take_held() {
    if constexpr (detail::PassedByHandle<T>) {
      return T::take_values(*this);
    } else if constexpr (std::same_as<T, Value>) {
      return one();
    } else if constexpr (std::same_as<T, at::Tensor>) {
      return message_.tensor(next_++);
    } else if constexpr (std::same_as<T, std::string>) {
      return message_.text(next_++);
    } else if constexpr (std::same_as<T, std::int64_t>) {
      return message_.integer(next_++);
    } else if constexpr (std::same_as<T, double>) {
      return message_.real(next_++);
    } else {
      const T* const found = std::get_if<T>(&one());
      if (!found) wrong_kind();
      return *found;
    }
  }
  std::uint64_t take_unsigned();
  std::size_t take_count();
  [[noreturn]] void wrong_kind() const;

 private:
  const Value& one();

  const Message& message_;
  std::size_t next_;
};

}  // namespace convoy::share
