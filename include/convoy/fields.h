#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

// Serialisation: how a value of a C++ type becomes a flat list of simple values, and is rebuilt
// from them. Everything that sends values to other processes uses it: messages of channels and
// queues, arguments of spawned functions and of RPC calls.
//
// A type of your own lists its fields, which may have any type that can be sent:
//
//   struct Job {
//     int seed = 0;
//     at::Tensor start;
//     CONVOY_FIELDS(seed, start)
//   };
//
// For a type that you cannot change, write a function in its namespace:
//
//   inline auto fields(Point& point) { return std::tie(point.x, point.y); }
//
// The receiver default-constructs the type and then assigns its fields. Both sides must have the
// same fields in the same order.
#define CONVOY_FIELDS(...)                        \
  auto fields() { return std::tie(__VA_ARGS__); } \
  auto fields() const { return std::tie(__VA_ARGS__); }

namespace convoy::detail {

template <class T>
concept FieldsInside = requires(T& value) { value.fields(); };
template <class T>
concept FieldsBeside = requires(T& value) { fields(value); };
template <class T>
concept HasFields = FieldsInside<T> || FieldsBeside<T>;

// The fields of a value, as references. A free function fields() takes a non-const reference, also
// when the value is only read.
template <HasFields T>
auto fields_of(T& value) {
  if constexpr (FieldsInside<T>) {
    return value.fields();
  } else {
    return fields(value);
  }
}

template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;
template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
inline constexpr bool kIsMap = false;
template <class... Types>
inline constexpr bool kIsMap<std::map<Types...>> = true;
template <class... Types>
inline constexpr bool kIsMap<std::unordered_map<Types...>> = true;
template <class T>
inline constexpr bool kIsVariant = false;
template <class... Types>
inline constexpr bool kIsVariant<std::variant<Types...>> = true;
template <class T>
concept Parts = requires { std::tuple_size<T>::value; };
template <class T>
inline constexpr bool kUnknown = false;

// Appends a value to a sink. A sink has
//   template <class T> static constexpr bool kHolds;  whether add() takes a T directly: at least
//                                                     bool, std::int64_t, double
//   void add(const T&);
//   void add_text(std::string_view);
//   void add_unsigned(std::uint64_t);
template <class Sink, class T>
void put_value(Sink& to, const T& value) {
  if constexpr (Sink::template kHolds<T>) {
    to.add(value);
  } else if constexpr (HasFields<T>) {
    std::apply([&to](const auto&... each) { (put_value(to, each), ...); },
               fields_of(const_cast<T&>(value)));
  } else if constexpr (std::convertible_to<const T&, std::string_view>) {
    to.add_text(std::string_view(value));
  } else if constexpr (std::is_enum_v<T>) {
    put_value(to, static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::unsigned_integral<T>) {
    to.add_unsigned(value);
  } else if constexpr (std::integral<T>) {
    to.add(static_cast<std::int64_t>(value));
  } else if constexpr (std::floating_point<T>) {
    to.add(static_cast<double>(value));
  } else if constexpr (kIsVector<T> || kIsMap<T>) {
    to.add(static_cast<std::int64_t>(value.size()));
    for (const auto& item : value) put_value<Sink, typename T::value_type>(to, item);
  } else if constexpr (kIsOptional<T>) {
    to.add(value.has_value());
    if (value) put_value(to, *value);
  } else if constexpr (kIsVariant<T>) {
    to.add(static_cast<std::int64_t>(value.index()));
    std::visit([&to](const auto& held) { put_value(to, held); }, value);
  } else if constexpr (Parts<T>) {
    std::apply([&to](const auto&... parts) { (put_value(to, parts), ...); }, value);
  } else {
    static_assert(std::same_as<T, std::monostate>,
                  "convoy does not know how to pass this type to another process: name its fields "
                  "with CONVOY_FIELDS, see convoy/fields.h");
  }
}

template <class Source>
struct Nesting {
  explicit Nesting(Source&) {}
};
template <class Source>
  requires requires { typename Source::Nested; }
struct Nesting<Source> : Source::Nested {
  using Source::Nested::Nested;
};

// Takes a value from a source. A source has kHolds as a sink, and
//   T take_held<T>();
//   std::uint64_t take_unsigned();
//   std::size_t take_count();         number of items that follow; never more than can follow
//   [[noreturn]] void wrong_kind();   throws: the value taken last has the wrong type
//   class Nested;                     (optional) constructed around each type with fields
template <class T, class Source>
T take_value(Source& from) {
  if constexpr (Source::template kHolds<T>) {
    return from.template take_held<T>();
  } else if constexpr (HasFields<T>) {
    [[maybe_unused]] const Nesting<Source> nesting(from);
    T value{};
    std::apply(
        [&from](auto&... each) {
          ((each = take_value<std::remove_cvref_t<decltype(each)>>(from)), ...);
        },
        fields_of(value));
    return value;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(take_value<std::underlying_type_t<T>>(from));
  } else if constexpr (std::unsigned_integral<T>) {
    const std::uint64_t value = from.take_unsigned();
    if (!std::in_range<T>(value)) from.wrong_kind();
    return static_cast<T>(value);
  } else if constexpr (std::integral<T>) {
    const auto value = from.template take_held<std::int64_t>();
    if (!std::in_range<T>(value)) from.wrong_kind();
    return static_cast<T>(value);
  } else if constexpr (std::floating_point<T>) {
    return static_cast<T>(from.template take_held<double>());
  } else if constexpr (kIsVector<T>) {
    T values;
    for (std::size_t n = from.take_count(); n > 0; --n) {
      values.push_back(take_value<typename T::value_type>(from));
    }
    return values;
  } else if constexpr (kIsMap<T>) {
    T values;
    for (std::size_t n = from.take_count(); n > 0; --n) {
      auto key = take_value<typename T::key_type>(from);
      auto value = take_value<typename T::mapped_type>(from);
      values.emplace(std::move(key), std::move(value));
    }
    return values;
  } else if constexpr (kIsOptional<T>) {
    if (!from.template take_held<bool>()) return std::nullopt;
    return take_value<typename T::value_type>(from);
  } else if constexpr (kIsVariant<T>) {
    return [&from]<std::size_t... i>(std::index_sequence<i...>) {
      using Make = T (*)(Source&);
      constexpr std::array<Make, sizeof...(i)> kMakers = {[](Source& source) {
        return T(std::in_place_index<i>, take_value<std::variant_alternative_t<i, T>>(source));
      }...};
      const auto index = from.template take_held<std::int64_t>();
      if (index < 0 || static_cast<std::uint64_t>(index) >= kMakers.size()) from.wrong_kind();
      return kMakers[static_cast<std::size_t>(index)](from);
    }(std::make_index_sequence<std::variant_size_v<T>>());
  } else if constexpr (Parts<T>) {
    return [&from]<std::size_t... i>(std::index_sequence<i...>) {
      // Braced initialisers are evaluated from left to right.
      return T{take_value<std::remove_const_t<std::tuple_element_t<i, T>>>(from)...};
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (std::same_as<T, std::monostate>) {
    return {};
  } else {
    static_assert(kUnknown<T>,
                  "convoy does not know how to get this type from another process; of views "
                  "(const char*, std::string_view) take the value itself, see convoy/fields.h");
  }
}

}  // namespace convoy::detail
