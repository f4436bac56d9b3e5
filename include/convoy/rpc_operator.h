#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/rpc_function.h"

namespace convoy::rpc {

// An operator of torch, by name: rpc::op("aten::add"). The overload is found by the arguments, or
// is part of the name: "aten::add.Tensor".
struct Operator {
  std::string name;
};
inline Operator op(std::string name) { return {std::move(name)}; }

// Argument and result types of operators.
using OperatorValue = std::variant<std::monostate, bool, std::int64_t, double, std::string,
                                   at::Tensor, std::vector<std::int64_t>, std::vector<double>,
                                   std::vector<bool>, std::vector<at::Tensor>>;

namespace detail {

// Runs in the callee, for operators that SessionOptions::operators of its session allows.
std::vector<OperatorValue> run_operator(const std::string& name,
                                        const std::vector<OperatorValue>& arguments);

template <class T>
OperatorValue operator_value(const T& value) {
  if constexpr (std::same_as<T, bool> || std::constructible_from<at::Tensor, const T&>) {
    return value;
  } else if constexpr (std::integral<T>) {
    return static_cast<std::int64_t>(value);
  } else if constexpr (std::floating_point<T>) {
    return static_cast<double>(value);
  } else if constexpr (std::same_as<T, std::nullopt_t>) {
    return std::monostate();
  } else if constexpr (std::convertible_to<const T&, std::string>) {
    return std::string(value);
  } else {
    return OperatorValue(value);
  }
}

[[noreturn]] void fail_operator_result(std::size_t wanted, std::size_t got);
// One result, or a tuple of several.
template <class Result>
Result operator_result(const std::vector<OperatorValue>& results) {
  const auto check = [&](std::size_t wanted) {
    if (results.size() != wanted) fail_operator_result(wanted, results.size());
  };
  if constexpr (std::is_void_v<Result>) {
    return;
  } else if constexpr (convoy::detail::Parts<Result>) {
    check(std::tuple_size_v<Result>);
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return Result{operator_result<std::tuple_element_t<i, Result>>({results[i]})...};
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  } else {
    check(1);
    const auto* const found = std::get_if<Result>(results.data());
    if (!found) fail_operator_result(1, 1);
    return *found;
  }
}

}  // namespace detail
}  // namespace convoy::rpc
