#include "ddp/module_parameters.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "convoy/sync_batch_norm.h"

namespace convoy {
namespace {

using torch::nn::Module;

bool contains(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

template <class Norm>
void add_statistics(const Module& part, std::vector<at::Tensor>& found) {
  if (const auto* norm = part.as<Norm>(); norm != nullptr && norm->is_training()) {
    for (const auto& buffer : norm->buffers(/*recurse=*/false)) found.push_back(buffer);
  }
}

// Reaches the parameters of modules without copying their names.
// NOLINTNEXTLINE(bugprone-incorrect-enable-shared-from-this): it is never made
class ParameterWalk : private Module {
 public:
  // True if those of `part`, and of the modules in it, come next.
  static bool matches(const Module& part, NamedTensors::const_iterator& next,
                      const NamedTensors::const_iterator& end) {
    constexpr auto kParameters = &ParameterWalk::parameters_;
    for (const auto& item : part.*kParameters) {
      if (!item.value().defined()) continue;
      if (next == end || !next->second.is_same(item.value())) return false;
      ++next;
    }
    for (const auto& child : part.children()) {
      if (!matches(*child, next, end)) return false;
    }
    return true;
  }
};

class NnModule final : public DdpModule {
 public:
  explicit NnModule(std::shared_ptr<Module> module) : module_(std::move(module)) {}

  std::string name() const override { return module_->name(); }
  bool is_training() const override { return module_->is_training(); }
  NamedTensors parameters() const override { return list_of(module_->named_parameters()); }
  bool holds(const NamedTensors& known) const override {
    auto next = known.begin();
    return ParameterWalk::matches(*module_, next, known.end()) && next == known.end();
  }
  NamedTensors buffers() const override { return list_of(module_->named_buffers()); }

  // Tables whose gradients have only the rows that were looked up.
  std::vector<at::Tensor> sparse() const override {
    std::vector<at::Tensor> tables;
    for (const auto& part : module_->modules()) {
      if (const auto* one = part->as<torch::nn::EmbeddingImpl>()) {
        if (one->options.sparse()) tables.push_back(one->weight);
      } else if (const auto* bag = part->as<torch::nn::EmbeddingBagImpl>()) {
        if (bag->options.sparse()) tables.push_back(bag->weight);
      }
    }
    return tables;
  }

  std::vector<at::Tensor> statistics() const override {
    std::vector<at::Tensor> found;
    for (const auto& part : module_->modules()) {
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

  bool has_sync_batch_norm() const override {
    const auto parts = module_->modules();
    return std::any_of(parts.begin(), parts.end(), [](const auto& part) {
      return part->template as<nn::SyncBatchNorm1dImpl>() != nullptr ||
             part->template as<nn::SyncBatchNorm2dImpl>() != nullptr ||
             part->template as<nn::SyncBatchNorm3dImpl>() != nullptr;
    });
  }

 private:
  static NamedTensors list_of(const torch::OrderedDict<std::string, at::Tensor>& items) {
    NamedTensors list;
    list.reserve(items.size());
    for (const auto& item : items) list.emplace_back(item.key(), item.value());
    return list;
  }

  const std::shared_ptr<Module> module_;
};

std::unordered_set<const void*> identities_of(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> found;
  for (const at::Tensor& tensor : tensors) found.insert(tensor.unsafeGetTensorImpl());
  return found;
}

}  // namespace

bool DdpModule::holds(const NamedTensors& known) const {
  const NamedTensors now = parameters();
  return std::equal(now.begin(), now.end(), known.begin(), known.end(),
                    [](const auto& a, const auto& b) { return a.second.is_same(b.second); });
}

std::string describe_changes(const NamedTensors& before, const NamedTensors& now,
                             const std::vector<std::string>& ignore) {
  const auto identities = [&](const NamedTensors& list) {
    std::unordered_set<const void*> found;
    for (const auto& [name, tensor] : list) found.insert(tensor.unsafeGetTensorImpl());
    return found;
  };
  const auto names_of_others = [&](const NamedTensors& list,
                                   const std::unordered_set<const void*>& known) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : list) {
      const bool is_known = known.contains(tensor.unsafeGetTensorImpl());
      if (!is_known && !contains(ignore, name)) names.push_back(name);
    }
    return names;
  };
  const auto gone = names_of_others(before, identities(now));
  std::vector<std::string> added, replaced, removed;
  for (const std::string& name : names_of_others(now, identities(before))) {
    (contains(gone, name) ? replaced : added).push_back(name);
  }
  for (const std::string& name : gone) {
    if (!contains(replaced, name)) removed.push_back(name);
  }
  std::string text;
  const auto tell = [&](const char* what, const std::vector<std::string>& names) {
    constexpr std::size_t kMost = 8;
    if (names.empty()) return;
    text += concat(text.empty() ? "" : "; ", what);
    for (std::size_t i = 0; i < std::min(kMost, names.size()); ++i) {
      text += concat(i == 0 ? " " : ", ", names[i]);
    }
    if (names.size() > kMost) text += concat(" and ", names.size() - kMost, " more");
  };
  if (added.empty() && replaced.empty()) return {};
  tell("added", added);
  tell("replaced", replaced);
  tell("removed", removed);
  return text;
}

std::shared_ptr<DdpModule> view_of(std::shared_ptr<Module> module) {
  if (!module) return nullptr;
  return std::make_shared<NnModule>(std::move(module));
}

ModuleParameters find_parameters(const DdpModule& module, const DdpOptions& options,
                                 const ParameterGroup* of) {
  ModuleParameters found;
  found.error = module.error();
  std::set<std::string> unknown(options.ignore.begin(), options.ignore.end());
  unknown.insert(options.delay_all_reduce_named_params.begin(),
                 options.delay_all_reduce_named_params.end());
  const auto tables = identities_of(module.sparse());
  std::unordered_map<const void*, std::size_t> places;
  std::unordered_set<const void*> ignored;
  const NamedTensors parameters = module.parameters();
  std::unordered_map<const void*, const ParameterGroup*> elsewhere;
  for (const ParameterGroup& group : options.parameter_groups) {
    unknown.insert(group.names.begin(), group.names.end());
  }
  for (const auto& [name, value] : parameters) {
    unknown.erase(name);
    const void* const tensor = value.defined() ? value.unsafeGetTensorImpl() : nullptr;
    if (contains(options.ignore, name)) ignored.insert(tensor);  // under all of its names
    for (const ParameterGroup& group : options.parameter_groups) {
      if (!group.group) found.error = "a group of parameter_groups is empty; pass one";
      if (!contains(group.names, name)) continue;
      if (!elsewhere.emplace(tensor, &group).second) {
        found.error = concat("parameter ", name, " is named twice in parameter_groups");
      }
    }
  }
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || ignored.contains(tensor.unsafeGetTensorImpl())) continue;
    const auto other = elsewhere.find(tensor.unsafeGetTensorImpl());
    if ((other == elsewhere.end() ? nullptr : other->second) != of) continue;
    const auto [place, is_new] =
        places.emplace(tensor.unsafeGetTensorImpl(), found.parameters.size());
    if (is_new) {
      found.parameters.push_back(tensor);
      found.names.push_back(name);
      if (tables.contains(tensor.unsafeGetTensorImpl())) found.sparse.push_back(place->second);
    } else {
      found.names[place->second] += " = " + name;
    }
    if (contains(options.delay_all_reduce_named_params, name)) {
      found.delayed.push_back(place->second);
    }
  }
  for (const auto& [name, buffer] : module.buffers()) {
    unknown.erase(name);
    if (!buffer.defined() || contains(options.ignore, name)) continue;
    found.must_agree.push_back(
        concat("buffer ", name, ": ", buffer.scalar_type(), " of sizes ", buffer.sizes()));
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

}  // namespace convoy
