#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "convoy/ddp.h"

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
ModuleParameters find_parameters(const torch::nn::Module& module, const DdpOptions& options,
                                 const ParameterGroup* of = nullptr);

// Statistics of normalisation layers in training mode: their forward writes them without telling
// autograd, and their backward does not read them. Compared by identity.
std::unordered_set<const void*> statistics_of(const torch::nn::Module& module);

// Buffers become the root's. What a graph has saved is found changed by autograd, but for `unseen`.
// `staging` is memory that is kept for the next time.
void broadcast_buffers(const ProcessGroup& group, const std::vector<at::Tensor>& buffers, int root,
                       const std::unordered_set<const void*>& unseen, at::Tensor& staging);

}  // namespace convoy
