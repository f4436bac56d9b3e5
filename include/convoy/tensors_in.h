#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

// Finds the tensors in the result of a module: tensors, vectors, arrays, maps, pairs, tuples,
// variants, optionals and pointers of them, also nested, and your own types if they have this
// function:
//
//   struct Result { torch::Tensor logits; std::optional<torch::Tensor> aux; int steps; };
//   template <class F> void for_each_tensor(Result& r, F&& f) {
//     convoy::for_each_tensor(r.logits, f);
//     convoy::for_each_tensor(r.aux, f);
//   }
//
// It must be in the namespace of the type, so that argument-dependent lookup finds it. A type
// without one does not compile: a tensor that is overlooked would be a lost gradient.
namespace convoy {

namespace detail::lookup {  // finds functions in namespaces of user types, and none of ours

void for_each_tensor() = delete;
template <class T, class F>
concept Described = requires(T& value, F& function) { for_each_tensor(value, function); };
template <class T, class F>
void call(T& value, F& function) {
  for_each_tensor(value, function);
}

}  // namespace detail::lookup

namespace detail {

template <class T>
concept Range = requires(T& t) {
  t.begin();
  t.end();
};
template <class T>
concept Tuple = requires { std::tuple_size<T>::value; };
template <class T>
concept Variant = requires { std::variant_size<T>::value; };
template <class T>
concept Pointer = requires(T& t) {
  static_cast<bool>(t);
  *t;
};
// Types that hold no tensors.
template <class T>
concept Plain = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::same_as<T, std::string> ||
                std::same_as<T, std::vector<bool>> || std::is_empty_v<T>;
template <class T>
inline constexpr bool kUndescribed = false;

// True for types that hold their tensors by value, so that a copy has its own: all that
// ForEachTensor knows, except pointers and views.
template <class T>
inline constexpr bool kOwnsItsTensors = false;
struct NoTensors {
  void operator()(at::Tensor&) const;
};
template <class T>
  requires(std::same_as<T, at::Tensor> || lookup::Described<T, NoTensors> || Plain<T>)
inline constexpr bool kOwnsItsTensors<T> = true;
template <class T, class... More>
inline constexpr bool kOwnsItsTensors<std::vector<T, More...>> = kOwnsItsTensors<T>;
template <class T, std::size_t n>
inline constexpr bool kOwnsItsTensors<std::array<T, n>> = kOwnsItsTensors<T>;
template <class T>
inline constexpr bool kOwnsItsTensors<std::optional<T>> = kOwnsItsTensors<T>;
template <class A, class B>
inline constexpr bool kOwnsItsTensors<std::pair<A, B>> =
    kOwnsItsTensors<std::remove_const_t<A>> && kOwnsItsTensors<B>;
template <class... Parts>
inline constexpr bool kOwnsItsTensors<std::tuple<Parts...>> = (kOwnsItsTensors<Parts> && ...);
template <class... Parts>
inline constexpr bool kOwnsItsTensors<std::variant<Parts...>> = (kOwnsItsTensors<Parts> && ...);
template <class T>
  requires requires { typename T::mapped_type; }
inline constexpr bool kOwnsItsTensors<T> = kOwnsItsTensors<typename T::mapped_type>;

struct ForEachTensor {
  template <class T, class F>
  void operator()(T& value, F&& function) const {
    using Value = std::remove_const_t<T>;
    if constexpr (std::same_as<Value, at::Tensor>) {
      function(value);
    } else if constexpr (lookup::Described<T, F>) {
      lookup::call(value, function);
    } else if constexpr (Plain<Value>) {
      // holds no tensors
    } else if constexpr (requires { typename Value::mapped_type; }) {
      for (auto& entry : value) (*this)(entry.second, function);
    } else if constexpr (Range<Value>) {
      for (auto& item : value) (*this)(item, function);
    } else if constexpr (Tuple<Value>) {
      std::apply([&](auto&... parts) { ((*this)(parts, function), ...); }, value);
    } else if constexpr (Variant<Value>) {
      std::visit([&](auto& held) { (*this)(held, function); }, value);
    } else if constexpr (Pointer<Value>) {
      if (value) (*this)(*value, function);
    } else {
      static_assert(kUndescribed<Value>,
                    "convoy does not know which tensors this type holds: write a "
                    "for_each_tensor(Type&, F&&) beside it, see convoy/tensors_in.h");
    }
  }
};

}  // namespace detail

// for_each_tensor(value, function): calls function(at::Tensor&) for each tensor in it, in order.
// NOLINTNEXTLINE(readability-identifier-naming): it is called like a function
inline constexpr detail::ForEachTensor for_each_tensor{};

// Returns these tensors as pointers into `value`.
template <class T>
std::vector<at::Tensor*> tensors_in(T& value) {
  std::vector<at::Tensor*> found;
  for_each_tensor(value, [&](at::Tensor& tensor) { found.push_back(&tensor); });
  return found;
}

}  // namespace convoy
