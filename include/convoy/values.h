#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/error.h"
#include "convoy/share.h"

// C++ values as values of a message: what arguments and results of other processes are made of.
//
// Numbers, enumerators, std::string, Bytes, tensors (shared, not copied), what a message holds
// already; vectors, maps, optionals, pairs and tuples of them; objects that several processes use
// (Published, Slots), which are the same object in the other process; and types of your own:
//
//   struct Job {
//     int seed; at::Tensor start;
//     void put_values(convoy::share::Message& to) const { convoy::share::put(to, seed, start); }
//     static Job take_values(convoy::share::ValueReader& from) {
//       return {from.take<int>(), from.take<at::Tensor>()};
//     }
//   };
namespace convoy::share {

class ValueReader;

namespace detail {

template <class T>
concept Custom = requires(const T& value, Message& to, ValueReader& from) {
  value.put_values(to);
  { T::take_values(from) } -> std::same_as<T>;
};
template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = !std::same_as<T, std::byte>;
template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
inline constexpr bool kIsMap = false;
template <class K, class V>
inline constexpr bool kIsMap<std::map<K, V>> = true;
template <class T>
concept Parts = requires { std::tuple_size<T>::value; };
// What a message can hold as it is.
template <class T, class V>
inline constexpr bool kIsAlternative = false;
template <class T, class... Kinds>
inline constexpr bool kIsAlternative<T, std::variant<Kinds...>> = (std::same_as<T, Kinds> || ...);
template <class T>
concept Held = kIsAlternative<T, Value>;
template <class T>
inline constexpr bool kUnknown = false;

std::int64_t checked_integer(std::uint64_t value);

}  // namespace detail

// Appends values to a message.
template <class T, class... More>
void put(Message& to, const T& value, const More&... more) {
  if constexpr (std::same_as<T, Value> || detail::Held<T>) {
    to.add(value);
  } else if constexpr (detail::Custom<T>) {
    value.put_values(to);
  } else if constexpr (std::convertible_to<const T&, std::string_view>) {
    to.add(std::string(std::string_view(value)));
  } else if constexpr (std::is_enum_v<T>) {
    put(to, static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::unsigned_integral<T>) {
    to.add(detail::checked_integer(value));
  } else if constexpr (std::integral<T>) {
    to.add(static_cast<std::int64_t>(value));
  } else if constexpr (std::floating_point<T>) {
    to.add(static_cast<double>(value));
  } else if constexpr (detail::kIsVector<T> || detail::kIsMap<T>) {
    to.add(static_cast<std::int64_t>(value.size()));
    for (const auto& item : value) put<typename T::value_type>(to, item);
  } else if constexpr (detail::kIsOptional<T>) {
    to.add(value.has_value());
    if (value) put(to, *value);
  } else if constexpr (detail::Parts<T>) {
    std::apply([&to](const auto&... parts) { (put(to, parts), ...); }, value);
  } else {
    static_assert(detail::kUnknown<T>,
                  "convoy does not know how to pass this type to another process: give it "
                  "put_values() and take_values(), see convoy/values.h");
  }
  (put(to, more), ...);
}

// Takes values from a message, in order. kInvalidArgument where a value is of another kind or is
// missing. Refers to the message.
class ValueReader {
 public:
  explicit ValueReader(const Message& message, std::size_t first = 0)
      : message_(message), next_(first) {}

  bool at_end() const { return next_ >= message_.size(); }
  std::size_t next() const { return next_; }

  template <class T>
  T take() {
    if constexpr (std::same_as<T, Value>) {
      return one();
    } else if constexpr (std::same_as<T, at::Tensor>) {
      return message_.tensor(next_++);
    } else if constexpr (std::same_as<T, std::string>) {
      return message_.text(next_++);
    } else if constexpr (std::same_as<T, Bytes>) {
      return message_.bytes(next_++);
    } else if constexpr ((detail::Held<T> && !std::integral<T> && !std::floating_point<T>) ||
                         std::same_as<T, bool>) {
      const T* const found = std::get_if<T>(&one());
      if (!found) wrong_kind();
      return *found;
    } else if constexpr (detail::Custom<T>) {
      return T::take_values(*this);
    } else if constexpr (std::is_enum_v<T>) {
      return static_cast<T>(take<std::underlying_type_t<T>>());
    } else if constexpr (std::integral<T>) {
      const std::int64_t value = message_.integer(next_++);
      if (!std::in_range<T>(value)) wrong_kind();
      return static_cast<T>(value);
    } else if constexpr (std::floating_point<T>) {
      return static_cast<T>(message_.real(next_++));
    } else if constexpr (detail::kIsVector<T>) {
      T values;
      for (std::size_t n = count(); n > 0; --n) {
        values.push_back(take<typename T::value_type>());
      }
      return values;
    } else if constexpr (detail::kIsMap<T>) {
      T values;
      for (std::size_t n = count(); n > 0; --n) {
        auto key = take<typename T::key_type>();
        auto value = take<typename T::mapped_type>();
        values.emplace(std::move(key), std::move(value));
      }
      return values;
    } else if constexpr (detail::kIsOptional<T>) {
      if (!take<bool>()) return std::nullopt;
      return take<typename T::value_type>();
    } else if constexpr (detail::Parts<T>) {
      return take_parts<T>(std::make_index_sequence<std::tuple_size_v<T>>());
    } else {
      static_assert(detail::kUnknown<T>,
                    "convoy does not know how to get this type from another process; of views "
                    "(const char*, std::string_view) take the value itself, see convoy/values.h");
    }
  }

 private:
  template <class T, std::size_t... i>
  T take_parts(std::index_sequence<i...>) {
    // Braces: evaluated from left to right.
    return T{take<std::remove_const_t<std::tuple_element_t<i, T>>>()...};
  }
  const Value& one();
  std::size_t count();
  [[noreturn]] void wrong_kind() const;

  const Message& message_;
  std::size_t next_;
};

}  // namespace convoy::share
