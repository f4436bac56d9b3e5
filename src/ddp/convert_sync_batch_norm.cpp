#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <vector>

#include "base/error.h"
#include "convoy/sync_batch_norm.h"

namespace convoy::nn {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

// What is done at the end, when it is clear that all of it can be done.
using Step = std::function<void()>;

template <class Sync>
bool plan_group(Module& part, const ProcessGroup& group, std::vector<Step>& plan) {
  auto* const norm = part.as<Sync>();
  if (norm == nullptr) return false;
  plan.emplace_back([norm, group] { norm->set_group(group); });
  return true;
}

[[noreturn]] void refuse_held(const std::string& name) {
  fail(ErrorKind::kUnsupported, "convert_sync_batchnorm: ", in_quotes(name),
       " is also held outside of its parent, for example by a member of a class, which would go on "
       "using it; ",
       "declare it as convoy::nn::SyncBatchNorm, or put it into a torch::nn::Sequential");
}

template <class Norm, class Sync>
bool plan_exchange(Module& parent, const std::string& key, const std::string& name,
                   const std::shared_ptr<Module>& child, const ProcessGroup& group,
                   std::vector<Step>& plan) {
  const auto* const norm = child->as<Norm>();
  if (norm == nullptr) return false;
  AnyModule* place = nullptr;
  if (auto* const sequence = parent.as<torch::nn::SequentialImpl>()) {
    for (AnyModule& item : *sequence) {
      if (item.ptr() == child) place = &item;
    }
  }
  // The parent's list of children, our copy of that, and the sequence.
  const long owners = place == nullptr ? 2 : 3;
  if (child.use_count() > owners) refuse_held(name);
  plan.emplace_back([&parent, key, norm, place, group] {
    auto sync = Sync::take_over(*norm);
    sync->train(norm->is_training());
    sync->set_group(group);
    if (place != nullptr) *place = AnyModule(sync);
    parent.replace_module(key, sync);
  });
  return true;
}

void plan_children(Module& parent, const std::string& prefix, const ProcessGroup& group,
                   std::vector<Step>& plan) {
  const auto children = parent.named_children();
  for (const auto& item : children) {
    const std::string name = prefix + item.key();
    const std::shared_ptr<Module>& child = item.value();
    using namespace torch::nn;
    const bool done = plan_exchange<BatchNorm1dImpl, SyncBatchNorm1dImpl>(parent, item.key(), name,
                                                                          child, group, plan) ||
                      plan_exchange<BatchNorm2dImpl, SyncBatchNorm2dImpl>(parent, item.key(), name,
                                                                          child, group, plan) ||
                      plan_exchange<BatchNorm3dImpl, SyncBatchNorm3dImpl>(parent, item.key(), name,
                                                                          child, group, plan) ||
                      plan_group<SyncBatchNorm1dImpl>(*child, group, plan) ||
                      plan_group<SyncBatchNorm2dImpl>(*child, group, plan) ||
                      plan_group<SyncBatchNorm3dImpl>(*child, group, plan);
    if (!done) plan_children(*child, name + ".", group, plan);
  }
}

}  // namespace

std::size_t convert_sync_batchnorm(Module& module, const ProcessGroup& group) {
  if (!group)
    fail(ErrorKind::kInvalidArgument, "convert_sync_batchnorm: the group is empty; pass one");
  using namespace torch::nn;
  if (module.as<BatchNorm1dImpl>() != nullptr || module.as<BatchNorm2dImpl>() != nullptr ||
      module.as<BatchNorm3dImpl>() != nullptr) {
    fail(ErrorKind::kUnsupported, "convert_sync_batchnorm: the module is a BatchNorm itself, not ",
         "one that has some; make a convoy::nn::SyncBatchNorm instead");
  }
  std::vector<Step> plan;
  plan_children(module, "", group, plan);
  for (const Step& step : plan) step();
  return plan.size();
}

}  // namespace convoy::nn
