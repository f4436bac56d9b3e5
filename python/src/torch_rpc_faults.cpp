#include "torch_rpc_faults.h"

#include "convoy/error.h"

namespace convoy::python {
namespace {

using torch::distributed::rpc::MessageType;

MessageType type_of(const std::string& name) {
  static const std::map<std::string, MessageType> all = {
      {"RREF_FORK_REQUEST", MessageType::RREF_FORK_REQUEST},
      {"RREF_CHILD_ACCEPT", MessageType::RREF_CHILD_ACCEPT},
      {"RREF_USER_DELETE", MessageType::RREF_USER_DELETE},
      {"CLEANUP_AUTOGRAD_CONTEXT_REQ", MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ},
      {"PYTHON_REMOTE_CALL", MessageType::PYTHON_REMOTE_CALL},
      {"SCRIPT_REMOTE_CALL", MessageType::SCRIPT_REMOTE_CALL},
      {"PYTHON_CALL", MessageType::PYTHON_CALL},
      {"SCRIPT_CALL", MessageType::SCRIPT_CALL},
      {"PYTHON_RREF_FETCH_CALL", MessageType::PYTHON_RREF_FETCH_CALL},
      {"SCRIPT_RREF_FETCH_CALL", MessageType::SCRIPT_RREF_FETCH_CALL}};
  const auto found = all.find(name);
  if (found == all.end()) {
    throw Error(ErrorKind::kInvalidArgument, "there is no message " + name);
  }
  return found->second;
}

}  // namespace

TorchRpcFaults::TorchRpcFaults(const std::vector<std::string>& failing, int times,
                               const std::map<std::string, double>& late)
    : times_(times) {
  for (const auto& name : failing) failing_.insert(type_of(name));
  for (const auto& [name, seconds] : late) late_.emplace(type_of(name), seconds);
}

bool TorchRpcFaults::fails(const torch::distributed::rpc::Message& message) {
  if (!failing_.contains(message.type())) return false;
  const std::lock_guard lock(mutex_);
  int& failed = failed_[std::string(message.payload().begin(), message.payload().end())];
  return failed++ < times_;
}

std::chrono::duration<double> TorchRpcFaults::delay_of(
    const torch::distributed::rpc::Message& message) const {
  const auto found = late_.find(message.type());
  return found == late_.end() ? std::chrono::duration<double>::zero() : found->second;
}

}  // namespace convoy::python
