#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "convoy/ddp_core.h"

namespace convoy {

// What a reducer needs to know of a module.
struct ModuleParameters {
  std::vector<at::Tensor> parameters;  // each once, frozen ones too
  std::vector<std::string> names;  // a shared one's are joined: "encoder.weight = decoder.weight"
  std::vector<std::size_t> sparse, delayed;
  std::vector<std::string> must_agree;  // buffers, ignored names
  std::string error;                    // if the options name what is not there
};
// Those of the model's group, or of one of the options' parameter_groups.
ModuleParameters find_parameters(const DdpModule& module, const DdpOptions& options,
                                 const ParameterGroup* of = nullptr);

// "added head.weight; replaced fc.weight, fc.bias"; empty if all tensors that are there now were
// before, in whatever order and under whatever names. Names in `ignore` do not count.
std::string describe_changes(const NamedTensors& before, const NamedTensors& now,
                             const std::vector<std::string>& ignore);

// A module of torch::nn.
std::shared_ptr<DdpModule> view_of(std::shared_ptr<torch::nn::Module> module);

// Buffers become the root's. What a graph has saved is found changed by autograd, but for `unseen`.
// `staging` is memory that is kept for the next time.
void broadcast_buffers(const ProcessGroup& group, const std::vector<at::Tensor>& buffers, int root,
                       const std::vector<at::Tensor>& unseen, at::Tensor& staging);

}  // namespace convoy
