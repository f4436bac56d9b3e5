#include "ddp/norm_weight.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/guarded.h"

namespace convoy {
namespace {

// Those alive, by backend.
Guarded<std::multimap<const void*, std::weak_ptr<NormWeight>>> reducers;

// The innermost last: a model may run another one in its forward.
thread_local std::vector<std::shared_ptr<NormWeight>> running_forwards;

// All that live.
std::vector<std::shared_ptr<NormWeight>> all_reducers() {
  std::vector<std::shared_ptr<NormWeight>> found;
  auto all = reducers.lock();
  for (const auto& [backend, weak] : *all) {
    if (auto alive = weak.lock()) found.push_back(std::move(alive));
  }
  return found;
}

// The one that reduces this parameter; nullptr if none does, or several.
std::shared_ptr<NormWeight> owner_of(const at::Tensor& parameter) {
  std::shared_ptr<NormWeight> owner;
  for (auto& one : all_reducers()) {
    if (!one->parameters.contains(parameter.unsafeGetTensorImpl())) continue;
    if (owner) return nullptr;
    owner = std::move(one);
  }
  return owner;
}

std::shared_ptr<NormWeight> model_of(const at::Tensor& parameter) {
  return running_forwards.empty() ? owner_of(parameter) : running_forwards.back();
}

std::vector<std::shared_ptr<NormWeight>> reducers_of(const ProcessGroup& group) {
  std::vector<std::shared_ptr<NormWeight>> found;
  auto all = reducers.lock();
  const auto [begin, end] = all->equal_range(group.backend().get());
  for (auto one = begin; one != end; ++one) {
    if (auto alive = one->second.lock()) found.push_back(std::move(alive));
  }
  return found;
}

}  // namespace

double NormWeight::use() {
  differs |= used && *used != samples;
  used = samples;
  return samples;
}

std::shared_ptr<NormWeight> enlist_reducer(const ProcessGroup& group, at::TensorList parameters) {
  auto self = std::make_shared<NormWeight>();
  for (const at::Tensor& parameter : parameters) {
    self->parameters.insert(parameter.unsafeGetTensorImpl());
  }
  auto all = reducers.lock();
  std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
  all->emplace(group.backend().get(), self);
  return self;
}

bool has_other_reducers(const ProcessGroup& group, const std::shared_ptr<NormWeight>& self) {
  const auto all = reducers_of(group);
  return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one != self; });
}

void enter_forward(std::shared_ptr<NormWeight> model) {
  running_forwards.push_back(std::move(model));
}

void leave_forward() {
  if (!running_forwards.empty()) running_forwards.pop_back();
}

NormWeights::NormWeights(const ProcessGroup& group, const at::Tensor& weight)
    : group_(group),
      trains_(weight.is_leaf() && weight.requires_grad()),
      in_forward_(!running_forwards.empty()),
      model_(model_of(weight)) {}

double NormWeights::use() const {
  if (const auto model = model_.lock()) return model->use();
  return in_forward_ ? 1 : use_all_of_group();
}

double NormWeights::use_all_of_group() const {
  double samples = 1;
  const auto all = reducers_of(group_);
  // A weight that trains and is in no reducer is in a model that none reduces.
  const auto others = all.empty() && !trains_ ? all_reducers() : all;
  if (all.empty() && std::ranges::any_of(others, &NormWeight::weighted)) {
    fail(ErrorKind::kInvalidArgument, "SyncBatchNorm, backward, group \"", group_.name(),
         "\", rank ", group_.rank(), " of ", group_.size(),
         ": gradients are weighted by samples in another group, and the layer cannot tell whether "
         "it is part of that model: it has no weight that trains; call it through the model's "
         "DistributedDataParallel, or give it the group of the model's Reducer");
  }
  for (const auto& one : all) {
    samples = all.front()->samples;
    if (one->samples == samples) continue;
    fail(ErrorKind::kInvalidArgument, "SyncBatchNorm, backward, group \"", group_.name(),
         "\", rank ", group_.rank(), " of ", group_.size(), ": models of this group weigh this ",
         "rank by ", samples, " and by ", one->samples,
         " samples, and the layer was not called in ",
         "the forward of one of them; call it through its DistributedDataParallel, or call ",
         "set_reduce of all of them alike");
  }
  for (const auto& one : all) one->use();
  return samples;
}

}  // namespace convoy
