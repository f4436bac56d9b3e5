// Operators of torch's that are called by name.
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>

#include "agent/request.h"
#include "base/error.h"
#include "base/quote.h"
#include "convoy/rpc.h"
#include "rpc/serve.h"
#include "rpc/session_impl.h"

namespace convoy::rpc::detail {

CONVOY_RPC(run_operator);

namespace {

c10::IValue to_ivalue(const OperatorValue& value) {
  return std::visit(
      [](const auto& held) -> c10::IValue {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::same_as<T, std::monostate>) {
          return {};
        } else if constexpr (std::same_as<T, std::vector<bool>>) {
          c10::List<bool> list;
          for (const bool each : held) list.push_back(each);
          return list;
        } else {
          return held;
        }
      },
      value);
}

OperatorValue from_ivalue(const c10::IValue& value) {
  if (value.isNone()) return std::monostate();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isTensor()) return value.toTensor();
  if (value.isIntList()) return value.toIntVector();
  if (value.isDoubleList()) return value.toDoubleVector();
  if (value.isTensorList()) return value.toTensorVector();
  if (value.isBoolList()) {
    std::vector<bool> list;
    for (const bool each : value.toBoolList()) list.push_back(each);
    return list;
  }
  fail(ErrorKind::kUnsupported, "a result of type ", value.tagKind(), " cannot be passed");
}

// "aten::add.Tensor": "aten::add" and "Tensor".
struct OperatorName {
  std::string name;
  std::optional<std::string> overload;
};
OperatorName parse_name(const std::string& text) {
  const std::size_t dot = text.find('.');
  if (dot == std::string::npos) return {text, std::nullopt};
  return {text.substr(0, dot), text.substr(dot + 1)};
}

// kInvalidArgument for what the owner of the session that serves this call has not allowed.
void check_allowed(const std::string& text, const std::string& name) {
  const agent::Request* const request = agent::Request::current();
  CONVOY_CHECK(request != nullptr);
  const auto session = SessionImpl::of(*request);
  if (session->allows(text) || session->allows(name)) return;
  throw Refusal(concat("operator ", in_quotes(text, 100), " is not allowed on ",
                       session->agent().self().name,
                       ": its SessionOptions::operators does not name it"));
}

}  // namespace

std::vector<OperatorValue> run_operator(const std::string& text,
                                        const std::vector<OperatorValue>& arguments) {
  const auto [name, overload] = parse_name(text);
  check_allowed(text, name);
  std::string why = "there is no such operator";
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (overload && op->schema().overload_name() != *overload) continue;
    torch::jit::Stack stack;
    for (const OperatorValue& argument : arguments) stack.push_back(to_ivalue(argument));
    try {
      op->schema().checkAndNormalizeInputs(stack);
    } catch (const std::exception&) {
      why = "its arguments fit none of its overloads";
      continue;
    }
    op->getOperation()(stack);
    std::vector<OperatorValue> results;
    for (const c10::IValue& result : stack) results.push_back(from_ivalue(result));
    return results;
  }
  throw Refusal(concat("operator ", in_quotes(text, 100), ": ", why));
}

void fail_operator_result(std::size_t wanted, std::size_t got) {
  if (wanted == got) {
    fail(ErrorKind::kInvalidArgument,
         "the operator's result does not have the type that was asked for");
  }
  fail(ErrorKind::kInvalidArgument, "the operator has ", got, " results, not ", wanted);
}

}  // namespace convoy::rpc::detail
