#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "convoy/fields.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"

// torch::nn modules on other workers.
//
//   CONVOY_REMOTE_MODULE(Net, int, int);                    // Net(in, out), and its forward
//   convoy::RemoteModule<Net> net(rpc, "worker1", 784, 10);
//   auto y = net.forward(x);
//   auto pending = net.forward_async(x);                    // Future<at::Tensor>
//   for (auto& [name, weight] : net.named_parameters()) ... // RRef<at::Tensor>
//
// The types after the module are those of a constructor. Write the macro after the module, in a
// file that every worker links, once for each constructor that is used.
#define CONVOY_REMOTE_MODULE(Module, ...)                                            \
  CONVOY_RPC(::convoy::rpc::detail::make_module<Module __VA_OPT__(, ) __VA_ARGS__>); \
  CONVOY_RPC(&Module::ContainedType::forward)

namespace convoy {
namespace rpc::detail {

template <class Module, class... Arguments>
Module make_module(Arguments... arguments) {
  return Module(std::move(arguments)...);
}

using ModuleState = std::map<std::string, at::Tensor>;
// Functions of all modules that other workers can call.
struct NamedParameter {
  std::string name;
  RRef<at::Tensor> parameter;
  CONVOY_FIELDS(name, parameter)
};
// In the module's order.
std::vector<NamedParameter> module_parameters(torch::nn::Module& module);
void module_train(torch::nn::Module& module, bool on);
ModuleState module_state(torch::nn::Module& module);
void load_module(torch::nn::Module& module, const ModuleState& state);

}  // namespace rpc::detail

// A module on another worker. M is its holder (TORCH_MODULE). Copies are the same module, which
// lives as long as one of them or a reference to it. Calls throw what RRef's calls throw.
// Thread-safe. All methods block except the constructors, forward_async() and reference().
template <class M>
class RemoteModule {
 public:
  using Impl = typename M::ContainedType;
  using State = rpc::detail::ModuleState;

  // Makes the module on that worker. Does not block: see RRef::created().
  template <class... Arguments>
  RemoteModule(const rpc::Session& session, const rpc::To& worker, Arguments... arguments)
      : module_(session.remote<rpc::detail::make_module<M, Arguments...>>(
            worker, std::move(arguments)...)) {}
  explicit RemoteModule(RRef<M> module) : module_(std::move(module)) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) const {
    return module_.template rpc_sync<&Impl::forward>(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  auto forward_async(Arguments&&... arguments) const {
    return module_.template rpc_async<&Impl::forward>(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return forward(std::forward<Arguments>(arguments)...);
  }

  // References to the module's parameters and those of its submodules, by name. The worker owns the
  // values.
  std::map<std::string, RRef<at::Tensor>> named_parameters() const {
    std::map<std::string, RRef<at::Tensor>> all;
    for (auto& each : in_order()) all.emplace(std::move(each.name), std::move(each.parameter));
    return all;
  }
  // In the module's order.
  std::vector<RRef<at::Tensor>> parameters() const {
    std::vector<RRef<at::Tensor>> all;
    for (auto& each : in_order()) all.push_back(std::move(each.parameter));
    return all;
  }

  void train() const { module_.template rpc_sync<rpc::detail::module_train>(true); }
  void eval() const { module_.template rpc_sync<rpc::detail::module_train>(false); }

  // Copies of the module's parameters and buffers, by name.
  State state() const { return module_.template rpc_sync<rpc::detail::module_state>(); }
  // Overwrites parameters and buffers. Throws kRemote if names or sizes differ; nothing is changed
  // then.
  void load_state(const State& state) const {
    module_.template rpc_sync<rpc::detail::load_module>(state);
  }

  const RRef<M>& reference() const { return module_; }

 private:
  auto in_order() const { return module_.template rpc_sync<rpc::detail::module_parameters>(); }

  RRef<M> module_;
};

}  // namespace convoy
