#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

#include "convoy/functions.h"
#include "convoy/future.h"
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

// A call as the function that serves it sees it.
class ServedCall {
 public:
  // For answers that are given later. Copies are of the same call.
  class Later {
   public:
    explicit Later(std::shared_ptr<void> call) : call_(std::move(call)) {}
    void reply(const Body& body) const;
    void fail(const std::exception_ptr& error) const noexcept;

   private:
    std::shared_ptr<void> call_;
  };

  ServedCall(void* call, ValueSource& arguments) : call_(call), arguments_(arguments) {}

  ValueSource& arguments() { return arguments_; }
  void reply(const Body& body) const;
  void fail(const std::exception_ptr& error) const noexcept;    // of the function
  void refuse(const std::exception_ptr& error) const noexcept;  // of its arguments
  Later later() const;

 private:
  void* call_;
  ValueSource& arguments_;
};

template <class R, class... Parameters>
struct FunctionShape {
  using Returned = std::decay_t<R>;
  using Result = typename Unwrapped<Returned>::Type;
  static constexpr bool kAsync = Unwrapped<Returned>::kIsFuture;
  using Values = std::tuple<std::decay_t<Parameters>...>;
  using Indices = std::index_sequence_for<Parameters...>;

  // Moves what the function takes by value.
  template <class Function, std::size_t... i>
  static decltype(auto) invoke(Function& function, Values& values, std::index_sequence<i...>) {
    return std::invoke(function, static_cast<Parameters&&>(std::get<i>(values))...);
  }
  template <class... Arguments>
  static constexpr bool kFits = (std::is_convertible_v<Arguments, std::decay_t<Parameters>> && ...);
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
  using Result = typename Shape::Result;

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
  with_body(TensorMode::kResult, false, [&](const Body& body) { answer.reply(body); }, result);
}

template <auto Function>
void serve(void* served) noexcept {
  using Rpc = RpcFunction<Function>;
  using Shape = typename Rpc::Shape;
  using Values = typename Rpc::Values;
  using Result = typename Rpc::Result;
  auto& call = *static_cast<ServedCall*>(served);
  bool entered = false;
  try {
    auto function = Function;
    if constexpr (Shape::kAsync) {
      // References among its parameters are to these, until it has ended.
      const auto values = std::make_shared<Values>(take_arguments<Values>(call));
      entered = true;
      Future<Result> future = Shape::invoke(function, *values, typename Shape::Indices());
      static_cast<void>(future.then([values, answer = call.later()](const Future<Result>& ended) {
        try {
          if constexpr (std::is_void_v<Result>) {
            ended.result();
            answer_with(answer, std::monostate());
          } else {
            answer_with(answer, ended.result());
          }
        } catch (...) {
          answer.fail(std::current_exception());
        }
      }));
    } else {
      // The arguments go before the result is sent: what was only passed through is then nobody
      // else's any more.
      const auto run = [&]() -> std::decay_t<Result> {
        Values values = take_arguments<Values>(call);
        entered = true;
        return Shape::invoke(function, values, typename Shape::Indices());
      };
      if constexpr (std::is_void_v<Result>) {
        run();
        answer_with(call, std::monostate());
      } else {
        const auto result = run();
        answer_with(call, result);
      }
    }
  } catch (...) {
    entered ? call.fail(std::current_exception()) : call.refuse(std::current_exception());
  }
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
  if constexpr (is_passable<typename Rpc::Values>()) what.run = &serve<Function>;
  return convoy::detail::export_function(what);
}

}  // namespace convoy::rpc::detail
