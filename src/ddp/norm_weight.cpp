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

std::shared_ptr<NormWeight> enlist_reducer(const ProcessGroup& group) {
  auto self = std::make_shared<NormWeight>();
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

NormWeights::NormWeights(const ProcessGroup& group)
    : group_(group),
      in_forward_(!running_forwards.empty()),
      model_(in_forward_ ? running_forwards.back() : nullptr) {}

double NormWeights::use() const {
  if (in_forward_) {
    const auto model = model_.lock();
    return model ? model->use() : 1;
  }
  double samples = 1;
  const auto all = reducers_of(group_);
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
