#pragma once

#include <concepts>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>

#include "convoy/detail/rpc_served.h"
#include "convoy/detail/rpc_shape.h"
#include "convoy/detail/rpc_values.h"
#include "convoy/future.h"

// Turns a received call into a call of the function, and its result into an answer. For
// convoy/rpc_function.h; nothing here is for direct use.
namespace convoy::rpc::detail {

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

// Serves calls of a function. kOn: on an object that a reference refers to.
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

  // `result` is set if the result stays here.
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
      // Destroy the arguments before the result is sent: a result that is one of them is then the
      // only holder of its memory.
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

  // For a function that returns a future. Its reference parameters refer to `values`, which live
  // until that future has ended.
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
  call.refuse(nullptr);  // the function has no object, or one that cannot be passed
}

}  // namespace convoy::rpc::detail
