#include "convoy/remote_module.h"

#include <ATen/core/grad_mode.h>

#include "base/error.h"

namespace convoy::rpc::detail {
namespace {

// Parameters and buffers.
ModuleState tensors_of(torch::nn::Module& module) {
  ModuleState all;
  for (const auto& each : module.named_parameters()) all.emplace(each.key(), each.value());
  for (const auto& each : module.named_buffers()) all.emplace(each.key(), each.value());
  return all;
}

}  // namespace

std::vector<NamedParameter> module_parameters(torch::nn::Module& module) {
  const Session session = current().session();
  std::vector<NamedParameter> all;
  for (const auto& each : module.named_parameters()) {
    all.push_back({each.key(), session.rref(at::Tensor(each.value()))});
  }
  return all;
}

void module_train(torch::nn::Module& module, bool on) { module.train(on); }

ModuleState module_state(torch::nn::Module& module) {
  ModuleState state;
  for (const auto& [name, tensor] : tensors_of(module)) state.emplace(name, tensor.detach());
  return state;
}

void load_module(torch::nn::Module& module, const ModuleState& state) {
  const at::NoGradGuard no_gradients;
  const ModuleState mine = tensors_of(module);
  for (const auto& [name, tensor] : mine) {
    const auto found = state.find(name);
    if (found == state.end() || found->second.sizes() != tensor.sizes()) {
      fail(ErrorKind::kInvalidArgument, "load_state: ", in_quotes(name),
           found == state.end() ? " is missing" : " has other sizes");
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!mine.contains(name)) {
      fail(ErrorKind::kInvalidArgument, "load_state: the module has no ", in_quotes(name));
    }
  }
  for (const auto& [name, tensor] : mine) tensor.copy_(state.at(name));
}

CONVOY_RPC(module_parameters);
CONVOY_RPC(module_train);
CONVOY_RPC(module_state);
CONVOY_RPC(load_module);

}  // namespace convoy::rpc::detail
