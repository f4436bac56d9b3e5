#include "torch_operator.h"

#include <torch/csrc/distributed/rpc/profiler/server_process_global_profiler.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace convoy::python {
namespace {

namespace operators_rpc = torch::distributed::rpc;

// Behind the arguments of a ScriptCall: the operator's schema, and its name, which begins so.
constexpr std::string_view kOperatorPrefix = "torch.ops.aten.";

// Operators on more, or with larger numbers, may take their time.
constexpr std::size_t kMostOperatorBytes = 4096;
constexpr std::int64_t kMostNumber = 4096;

bool may_be_small_operator(const operators_rpc::Message& request) {
  if (request.type() != operators_rpc::MessageType::SCRIPT_CALL) return false;
  const std::string_view payload(request.payload().data(), request.payload().size());
  if (payload.find(kOperatorPrefix) == std::string_view::npos || request.tensors().empty()) {
    return false;
  }
  // A reference is counted when it is read, which happens once.
  if (payload.find("torch.distributed") != std::string_view::npos) return false;
  std::size_t bytes = payload.size();
  for (const at::Tensor& tensor : request.tensors()) {
    if (tensor.layout() != c10::kStrided) return false;
    bytes += tensor.nbytes();
  }
  return bytes <= kMostOperatorBytes;
}

// Lists of numbers may be sizes.
bool is_small(const c10::IValue& argument) {
  if (argument.isInt()) {
    return argument.toInt() >= -kMostNumber && argument.toInt() <= kMostNumber;
  }
  return argument.isTensor() || argument.isNone() || argument.isBool() || argument.isDouble() ||
         argument.isString();
}

// Of ATen itself: others, such as aten::dist_backward, wait for messages. nullptr: there is none.
std::shared_ptr<torch::jit::Operator> find_operator(const std::string& schema) {
  static std::mutex mutex;
  static auto* const known =
      new std::unordered_map<std::string, std::shared_ptr<torch::jit::Operator>>;
  const std::lock_guard lock(mutex);
  const auto found = known->find(schema);
  if (found != known->end()) return found->second;
  const auto name = schema.substr(0, schema.find_first_of(".("));
  for (const auto& each : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (each->isC10Op() && toString(each->schema()) == schema)
      return known->emplace(schema, each).first->second;
  }
  return nullptr;
}

}  // namespace

c10::intrusive_ptr<operators_rpc::Message> answer_small_operator(
    operators_rpc::RpcAgent& agent, const operators_rpc::Message& request) {
  using torch::distributed::rpc::profiler::processglobal::StateStackEntry;
  if (!may_be_small_operator(request) || StateStackEntry::current()) return nullptr;
  try {
    const auto& payload = request.payload();
    auto stack = torch::jit::unpickle(payload.data(), payload.size(), *agent.getTypeResolver(),
                                      request.tensors())
                     .toTupleRef()
                     .elements()
                     .vec();
    if (stack.size() < 2 || !stack.back().isString() ||
        !stack.back().toStringRef().starts_with(kOperatorPrefix)) {
      return nullptr;
    }
    stack.pop_back();
    if (!stack.back().isString()) return nullptr;
    const auto operation = find_operator(stack.back().toStringRef());
    if (!operation) return nullptr;
    stack.pop_back();
    if (!std::ranges::all_of(stack, is_small)) return nullptr;
    operation->getOperation()(stack);
    if (stack.size() != 1) return nullptr;
    auto answer = std::move(operators_rpc::ScriptResp(std::move(stack.front()))).toMessage();
    answer->setId(request.id());
    return answer;
  } catch (const std::exception& error) {
    return operators_rpc::createExceptionResponse(error, request.id());
  }
}

}  // namespace convoy::python
