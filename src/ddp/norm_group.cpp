#include "ddp/norm_group.h"

#include <ATen/Functions.h>

#include <map>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/guarded.h"
#include "ddp/join_context.h"
#include "ddp/reduce_bucket.h"

namespace convoy {
namespace {

// By backend of the parent.
Guarded<std::map<const void*, std::weak_ptr<NormGroup>>> groups;

// The detail of a call in a Join: number of elements, and these.
constexpr std::uint64_t kBackward = std::uint64_t{1} << 63;
constexpr std::uint64_t kDouble = std::uint64_t{1} << 62;

}  // namespace

std::shared_ptr<NormGroup> NormGroup::find(const ProcessGroup& parent) {
  auto all = groups.lock();
  const auto found = all->find(parent.backend().get());
  return found == all->end() ? nullptr : found->second.lock();
}

std::shared_ptr<NormGroup> NormGroup::of(const ProcessGroup& parent) {
  if (auto known = find(parent)) return known;
  auto made = std::make_shared<NormGroup>(parent);
  {
    const PurposeScope scope({.what = "the constructor of SyncBatchNorm"});
    if (parent.size() > 1) parent.barrier();  // a rank that has none is told at once
    made->ready();
  }
  auto all = groups.lock();
  std::erase_if(*all, [](const auto& one) { return one.second.expired(); });
  (*all)[parent.backend().get()] = made;
  return made;
}

const ProcessGroup& NormGroup::ready() {
  if (!own_) own_ = own_group(parent_, "norm");
  return own_;
}

void NormGroup::abandon() {
  if (!own_ || own_ == parent_) return;
  abort_because(own_, "a forward or backward failed there");
  own_ = {};
}

void NormGroup::tell(bool backward, const at::Tensor& tensor) const {
  const auto join = JoinContext::of(parent_);
  if (!join || !join->is_live() || join->throws_early()) return;
  const bool is_double = tensor.scalar_type() == at::kDouble;
  join->call(JoinCall::kStatistics, static_cast<std::uint64_t>(tensor.numel()) |
                                        (backward ? kBackward : 0) | (is_double ? kDouble : 0));
}

template <class Function>
void NormGroup::guarded(const char* what, Function function) {
  try {
    function();
  } catch (...) {
    rethrow_with(concat("SyncBatchNorm, ", what, ", group \"", parent_.name(), "\", rank ",
                        parent_.rank(), " of ", parent_.size(),
                        " (if another rank's backward failed, the cause is there): "));
  }
}

at::Tensor NormGroup::gather(const at::Tensor& mine) {
  at::Tensor all;
  guarded("forward", [&] {
    tell(/*backward=*/false, mine);
    all = ready().all_gather(mine);
  });
  return all;
}

void NormGroup::sum(const at::Tensor& tensor) {
  guarded("backward", [&] {
    tell(/*backward=*/true, tensor);
    ready().all_reduce(tensor);
  });
}

void NormGroup::shadow(std::uint64_t detail) {
  const auto elements = static_cast<std::int64_t>(detail & ~(kBackward | kDouble));
  const at::Tensor nothing =
      at::zeros({elements}, (detail & kDouble) != 0 ? at::kDouble : at::kFloat);
  if ((detail & kBackward) != 0) {
    ready().all_reduce(nothing);
  } else {
    ready().all_gather(nothing);
  }
}

void abandon_norms(const ProcessGroup& parent) {
  if (const auto norms = NormGroup::find(parent)) norms->abandon();
}

bool has_sync_batch_norms(const ProcessGroup& group) { return NormGroup::find(group) != nullptr; }

void shadow_statistics(const ProcessGroup& group, std::uint64_t detail) {
  const auto norms = NormGroup::find(group);
  CONVOY_CHECK(norms != nullptr, "other ranks have a SyncBatchNorm of this group");
  norms->shadow(detail);
}

}  // namespace convoy
