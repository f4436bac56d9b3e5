#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

#include "convoy/functions.h"
#include "convoy/future.h"
#include "convoy/rpc_served.h"
#include "convoy/rpc_values.h"

// Functions that other workers may call.
//
//   at::Tensor my_add(at::Tensor a, at::Tensor b) { return a + b; }
//   CONVOY_RPC(my_add);
//
// In the namespace of the function, behind it, in a file that every worker links. Free functions,
// static and other member functions (CONVOY_RPC(&Model::forward); the object is the first argument,
// where it can be passed), and constexpr lambdas without captures. A function that returns a
// Future<T>, a coroutine perhaps, is one whose result is a T.
#define CONVOY_RPC(...) CONVOY_RPC_NUMBERED(__COUNTER__, __VA_ARGS__)

#define CONVOY_RPC_NUMBERED(number, ...) CONVOY_RPC_EXPORT(number, __VA_ARGS__)
#define CONVOY_RPC_EXPORT(number, ...)                                                       \
  namespace {                                                                                \
  struct ConvoyRpcScope##number {};                                                          \
  [[maybe_unused]] const bool kConvoyRpc##number =                                           \
      ::convoy::rpc::detail::export_function<(__VA_ARGS__)>(#__VA_ARGS__,                    \
                                                            typeid(ConvoyRpcScope##number)); \
  }                                                                                          \
  static_assert(true)

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
  // Those behind the object of a function that is called on a reference.
  using Rest = typename TailOf<Values>::Type;
  using RestIndices = std::make_index_sequence<std::tuple_size_v<Rest>>;
  template <std::size_t i>
  using Parameter = std::tuple_element_t<i, std::tuple<Parameters...>>;

  // Moves what the function takes by value.
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

  // What it is called on, if that is a reference: the object of a member function, or what a
  // function takes by reference that cannot be passed.
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

template <class Values>
Values take_arguments(ServedCall& call) {
  Values values = call.arguments().template take<Values>();
  call.arguments().finish();
  return values;
}

template <class Answer, class Result>
void answer_with(const Answer& answer, const Result& result) {
  with_body(
      &answer.peer(), TensorMode::kResult, false, [&](const Body& body) { answer.reply(body); },
      result);
}

// A function with its arguments; kOn: on an object that a reference refers to.
template <auto Function, bool kOn>
struct Serving {
  using Rpc = RpcFunction<Function>;
  using Shape = typename Rpc::Shape;
  using Result = typename Rpc::Result;
  using Values = std::conditional_t<kOn, typename Rpc::Rest, typename Rpc::Values>;

  static decltype(auto) invoke(HeldValue* object, Values& values) {
    auto function = Function;
    if constexpr (kOn) {
      return Shape::invoke_on(function, object_in<typename Rpc::Object>(*object), values,
                              typename Shape::RestIndices());
    } else {
      return Shape::invoke(function, values, typename Shape::Indices());
    }
  }

  // `result` is a reference if the result stays here.
  template <class Answer, class Made>
  static void finish(const Answer& answer, Made&& made, const RRefHandle& result) {
    if (result) [[unlikely]] {
      if constexpr (std::constructible_from<Stored<Result>, Made&&>) {
        keep_result(result, std::make_shared<HeldValueOf<Stored<Result>>>(std::forward<Made>(made)),
                    type_number<Stored<Result>>());
        answer_with(answer, std::monostate());
      } else {
        fail_result(typeid(Result));
      }
    } else if constexpr (is_passable<Stored<Result>>()) {
      answer_with(answer, made);
    } else {
      fail_result(typeid(Result));
    }
  }
  template <class Answer>
  static void fail(const Answer& answer, const RRefHandle& result) noexcept {
    if (result) keep_failure(result, std::current_exception());
    answer.fail(std::current_exception());
  }

  template <class Answer>
  static void run(const Answer& answer, HeldValue* object, Values& values,
                  const RRefHandle& result) noexcept {
    try {
      // The arguments go before the result is sent: what was only passed through is then nobody
      // else's any more.
      auto made = [&]() -> Stored<Result> {
        Values mine = std::move(values);
        if constexpr (std::is_void_v<Result>) {
          invoke(object, mine);
          return {};
        } else {
          return invoke(object, mine);
        }
      }();
      finish(answer, std::move(made), result);
    } catch (...) {
      fail(answer, result);
    }
  }

  // Of a function that returns a future. References among its parameters are to `values`, until it
  // has ended.
  static void start(const ServedCall::Later& answer, const std::shared_ptr<HeldValue>& object,
                    const std::shared_ptr<Values>& values, const RRefHandle& result) noexcept {
    try {
      Future<Result> future = invoke(object.get(), *values);
      static_cast<void>(future.then([values, object, answer, result](const Future<Result>& ended) {
        try {
          if constexpr (std::is_void_v<Result>) {
            ended.result();
            finish(answer, std::monostate(), result);
          } else {
            finish(answer, ended.result(), result);
          }
        } catch (...) {
          fail(answer, result);
        }
      }));
    } catch (...) {
      fail(answer, result);
    }
  }

  static void serve(ServedCall& call) noexcept {
    RRefHandle result;
    try {
      if constexpr (kOn) call.take_object();
      if ((call.flags() & ServedCall::kKeepsResult) != 0) [[unlikely]]
        result = call.take_result();
      if constexpr (Shape::kAsync) {
        const auto values = std::make_shared<Values>(take_arguments<Values>(call));
        if (call.ready()) return start(call.later(), call.object(), values, result);
        call.when_ready(
            [values, result](const auto& answer, const auto& object) {
              start(answer, object, values, result);
            },
            result);
      } else {
        Values values = take_arguments<Values>(call);
        if (call.ready()) [[likely]]
          return run(call, call.object().get(), values, result);
        call.when_ready([kept = std::make_shared<Values>(std::move(values)), result](
                            const auto& answer,
                            const auto& object) { run(answer, object.get(), *kept, result); },
                        result);
      }
    } catch (...) {
      if (result) keep_failure(result, std::current_exception());
      call.refuse(std::current_exception());
    }
  }
};

template <auto Function>
void serve(void* served) noexcept {
  using Rpc = RpcFunction<Function>;
  auto& call = *static_cast<ServedCall*>(served);
  if ((call.flags() & ServedCall::kOnReference) != 0) {
    if constexpr (Rpc::kHasObject && is_passable<typename Rpc::Rest>()) {
      return Serving<Function, true>::serve(call);
    }
  } else if constexpr (is_passable<typename Rpc::Values>()) {
    return Serving<Function, false>::serve(call);
  }
  call.refuse(nullptr);  // it has no object, or one that cannot be passed
}

// A function as a caller needs it.
struct CallKey {
  const convoy::detail::FunctionEntry* entry = nullptr;
  std::uint32_t id = 0;  // the engine's
};
CallKey call_key(const convoy::detail::CallRegistration& registration);

template <auto Function>
convoy::detail::CallRegistration registration() {
  using Rpc = RpcFunction<Function>;
  convoy::detail::CallRegistration what;
  what.identity = &convoy::detail::FunctionIdentity<Function>::kHere;
  what.type = &typeid(convoy::detail::FunctionIdentity<Function>);
  what.lambda = Rpc::kLambda;
  what.signature = std::move(Rpc::signature().text());
  return what;
}

template <auto Function>
const CallKey& key_of() {
  static const CallKey key = call_key(registration<Function>());
  return key;
}

template <auto Function>
bool export_function(std::string_view text, const std::type_info& scope) {
  using Rpc = RpcFunction<Function>;
  auto what = registration<Function>();
  what.text = text;
  what.scope = &scope;
  // An object that cannot be passed: its functions are called on references to it.
  if constexpr (is_passable<typename Rpc::Values>() ||
                (Rpc::kHasObject && is_passable<typename Rpc::Rest>())) {
    what.run = &serve<Function>;
  }
  return convoy::detail::export_function(what);
}

}  // namespace convoy::rpc::detail
