#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "convoy/detail/future_core.h"
#include "convoy/detail/rpc_signature.h"

// Parameters, result and object of a function. For convoy/rpc_function.h; nothing here is for
// direct use.
namespace convoy::rpc::detail {

template <class Tuple>
struct TailOf {
  using Type = std::tuple<>;
};
template <class First, class... Others>
struct TailOf<std::tuple<First, Others...>> {
  using Type = std::tuple<Others...>;
};

template <class R, class... Parameters>
struct FunctionShape {
  using Returned = std::decay_t<R>;
  using Result = typename Unwrapped<Returned>::Type;
  static constexpr bool kAsync = Unwrapped<Returned>::kIsFuture;
  using Values = std::tuple<std::decay_t<Parameters>...>;
  using Indices = std::index_sequence_for<Parameters...>;
  // The parameters after the object, for a call on a reference.
  using Rest = typename TailOf<Values>::Type;
  using RestIndices = std::make_index_sequence<std::tuple_size_v<Rest>>;
  template <std::size_t i>
  using Parameter = std::tuple_element_t<i, std::tuple<Parameters...>>;

  // Moves parameters that the function takes by value.
  template <class Function, std::size_t... i>
  static decltype(auto) invoke(Function& function, Values& values, std::index_sequence<i...>) {
    return std::invoke(function, static_cast<Parameters&&>(std::get<i>(values))...);
  }
  template <class Function, class Object, std::size_t... i>
  static decltype(auto) invoke_on(Function& function, Object& object, Rest& rest,
                                  std::index_sequence<i...>) {
    return std::invoke(function, object, static_cast<Parameter<i + 1>&&>(std::get<i>(rest))...);
  }
};

template <class Function>
struct ShapeOf : ShapeOf<decltype(&Function::operator())> {};  // of a lambda
template <class R, class... P>
struct ShapeOf<R (*)(P...)> {
  using Shape = FunctionShape<R, P...>;
  using Object = void;
};
template <class R, class... P>
struct ShapeOf<R (*)(P...) noexcept> : ShapeOf<R (*)(P...)> {};
// NOLINTBEGIN(bugprone-macro-parentheses): a qualifier is no expression
#define CONVOY_RPC_MEMBER(qualifier)          \
  template <class R, class C, class... P>     \
  struct ShapeOf<R (C::*)(P...) qualifier> {  \
    using Shape = FunctionShape<R, C&, P...>; \
    using Lambda = FunctionShape<R, P...>;    \
    using Object = C;                         \
  };
CONVOY_RPC_MEMBER()
CONVOY_RPC_MEMBER(const)
CONVOY_RPC_MEMBER(noexcept)
CONVOY_RPC_MEMBER(const noexcept)
CONVOY_RPC_MEMBER(&)
CONVOY_RPC_MEMBER(const&)
#undef CONVOY_RPC_MEMBER
// NOLINTEND(bugprone-macro-parentheses)

template <auto Function>
struct RpcFunction {
  using Type = std::remove_cv_t<decltype(Function)>;
  static constexpr bool kLambda = std::is_class_v<Type>;
  static consteval auto shape() {
    if constexpr (kLambda) {
      return std::type_identity<typename ShapeOf<Type>::Lambda>();
    } else {
      return std::type_identity<typename ShapeOf<Type>::Shape>();
    }
  }
  using Shape = typename decltype(shape())::type;
  using Values = typename Shape::Values;
  using Rest = typename Shape::Rest;
  using Result = typename Shape::Result;

  // The type of the object, for calls on a reference: the class of a member function, or the type
  // of a first parameter that cannot be passed.
  static consteval auto object() {
    if constexpr (std::is_member_pointer_v<Type>) {
      return std::type_identity<typename ShapeOf<Type>::Object>();
    } else if constexpr (std::tuple_size_v<Values> != 0) {
      using First = std::tuple_element_t<0, Values>;
      if constexpr (!is_passable<First>()) {
        return std::type_identity<First>();
      } else {
        return std::type_identity<void>();
      }
    } else {
      return std::type_identity<void>();
    }
  }
  using Object = typename decltype(object())::type;
  static constexpr bool kHasObject = !std::is_void_v<Object>;

  static Describer signature() {
    Describer text;
    text.add<Result>();
    text.text() += ' ';
    [&]<class... V>(std::tuple<V...>*) {
      text.add_list<V...>('(', ')');
    }(static_cast<Values*>(nullptr));
    return text;
  }
};

}  // namespace convoy::rpc::detail
