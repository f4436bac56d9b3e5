#include "ddp/module_parameters.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "convoy/sync_batch_norm.h"

namespace convoy {
namespace {

using torch::nn::Module;

bool contains(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// Tables whose gradients have only the rows that were looked up.
std::unordered_set<const void*> sparse_tables(const Module& module) {
  std::unordered_set<const void*> tables;
  for (const auto& part : module.modules()) {
    if (const auto* one = part->as<torch::nn::EmbeddingImpl>()) {
      if (one->options.sparse()) tables.insert(one->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = part->as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) tables.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  return tables;
}

template <class Norm>
void add_statistics(const Module& part, std::unordered_set<const void*>& found) {
  if (const auto* norm = part.as<Norm>(); norm != nullptr && norm->is_training()) {
    for (const auto& buffer : norm->buffers(/*recurse=*/false)) {
      found.insert(buffer.unsafeGetTensorImpl());
    }
  }
}

}  // namespace

ModuleParameters find_parameters(const Module& module, const DdpOptions& options,
                                 const ParameterGroup* of) {
  ModuleParameters found;
  std::set<std::string> unknown(options.ignore.begin(), options.ignore.end());
  unknown.insert(options.delay_all_reduce_named_params.begin(),
                 options.delay_all_reduce_named_params.end());
  const auto tables = sparse_tables(module);
  std::unordered_map<const void*, std::size_t> places;
  std::unordered_set<const void*> ignored;
  const auto parameters = module.named_parameters();
  std::unordered_map<const void*, const ParameterGroup*> elsewhere;
  for (const ParameterGroup& group : options.parameter_groups) {
    unknown.insert(group.names.begin(), group.names.end());
  }
  for (const auto& item : parameters) {
    unknown.erase(item.key());
    const void* const tensor =
        item.value().defined() ? item.value().unsafeGetTensorImpl() : nullptr;
    if (contains(options.ignore, item.key())) ignored.insert(tensor);  // under all of its names
    for (const ParameterGroup& group : options.parameter_groups) {
      if (!group.group) found.error = "a group of parameter_groups is none";
      if (!contains(group.names, item.key())) continue;
      if (!elsewhere.emplace(tensor, &group).second) {
        found.error = concat("parameter ", item.key(), " is named twice in parameter_groups");
      }
    }
  }
  for (const auto& item : parameters) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || ignored.contains(tensor.unsafeGetTensorImpl())) continue;
    const auto other = elsewhere.find(tensor.unsafeGetTensorImpl());
    if ((other == elsewhere.end() ? nullptr : other->second) != of) continue;
    const auto [place, is_new] =
        places.emplace(tensor.unsafeGetTensorImpl(), found.parameters.size());
    if (is_new) {
      found.parameters.push_back(tensor);
      found.names.push_back(item.key());
      if (tables.contains(tensor.unsafeGetTensorImpl())) found.sparse.push_back(place->second);
    } else {
      found.names[place->second] += " = " + item.key();
    }
    if (contains(options.delay_all_reduce_named_params, item.key())) {
      found.delayed.push_back(place->second);
    }
  }
  for (const auto& item : module.named_buffers()) {
    unknown.erase(item.key());
    if (!item.value().defined() || contains(options.ignore, item.key())) continue;
    found.must_agree.push_back(concat("buffer ", item.key(), ": ", item.value().scalar_type(),
                                      " of sizes ", item.value().sizes()));
  }
  for (const std::string& name : options.ignore) {
    found.must_agree.push_back(concat("ignored ", name));
  }
  found.must_agree.push_back(concat("option forward_sync_buffers: ", options.forward_sync_buffers,
                                    ", init_sync: ", options.init_sync,
                                    ", buffer_sync: ", static_cast<int>(options.buffer_sync)));
  if (!found.error.empty()) return found;
  if (!unknown.empty()) {
    found.error = concat("the module has no parameter or buffer ", in_quotes(*unknown.begin()),
                         ", which the options name");
  }
  return found;
}

std::unordered_set<const void*> statistics_of(const Module& module) {
  std::unordered_set<const void*> found;
  for (const auto& part : module.modules()) {
    add_statistics<torch::nn::BatchNorm1dImpl>(*part, found);
    add_statistics<torch::nn::BatchNorm2dImpl>(*part, found);
    add_statistics<torch::nn::BatchNorm3dImpl>(*part, found);
    add_statistics<nn::SyncBatchNorm1dImpl>(*part, found);
    add_statistics<nn::SyncBatchNorm2dImpl>(*part, found);
    add_statistics<nn::SyncBatchNorm3dImpl>(*part, found);
    add_statistics<torch::nn::InstanceNorm1dImpl>(*part, found);
    add_statistics<torch::nn::InstanceNorm2dImpl>(*part, found);
    add_statistics<torch::nn::InstanceNorm3dImpl>(*part, found);
  }
  return found;
}

}  // namespace convoy
