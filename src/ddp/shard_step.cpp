// ShardedOptimizer: a step of all ranks.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "ddp/sharded_optimizer_impl.h"

namespace convoy {
namespace {

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kShardedName, ": ", text...);
}

}  // namespace

// What ranks tell each other:
//   0  1: ready, 2: not
//   1  hash of the options
//   9  for each member 1 if it has a gradient
void ShardedOptimizerBase::Impl::meet(const std::vector<bool>& has) {
  std::string error;
  try {
    if (owner_->param_groups().size() != rules_.size()) {
      refuse("groups cannot be added to it; make another one");
    }
    rules_ = rules();
    for (const OptimizerRule& rule : rules_) check_rule(kShardedName, rule);
    for (Member& member : members_) hold(member);
  } catch (const Error& e) {
    error = e.what();
  }
  constexpr std::int64_t kHead = 9;
  const at::Tensor mine = at::zeros({kHead + static_cast<std::int64_t>(has.size())}, at::kByte);
  auto* const bytes = mine.mutable_data_ptr<std::uint8_t>();
  bytes[0] = error.empty() ? 1 : 2;
  const std::uint64_t hash = options_hash();
  std::memcpy(bytes + 1, &hash, sizeof(hash));
  for (std::size_t m = 0; m < has.size(); ++m) bytes[kHead + static_cast<std::int64_t>(m)] = has[m];
  const at::Tensor all = at::empty({group_.size(), mine.numel()}, at::kByte);
  group_.all_gather_single(all.view({-1}), mine);
  if (!error.empty()) throw Error(ErrorKind::kInvalidArgument, error);
  for (int r = 0; r < group_.size(); ++r) {
    const auto* const theirs = all[r].const_data_ptr<std::uint8_t>();
    if (theirs[0] != 1) refuse("rank ", r, " has refused the step: see its own error");
    if (std::memcmp(theirs + 1, bytes + 1, sizeof(hash)) != 0) {
      refuse("rank ", r, " has other options in its groups than rank ", group_.rank());
    }
    for (std::size_t m = 0; m < has.size(); ++m) {
      if ((theirs[kHead + static_cast<std::int64_t>(m)] != 0) == has[m]) continue;
      refuse("rank ", has[m] ? r : group_.rank(), " has no gradient for ", name_of(members_[m]),
             ", but rank ", has[m] ? group_.rank() : r, " has");
    }
  }
}

void ShardedOptimizerBase::Impl::step() {
  const auto reducer = reducer_.lock();
  if (!reducer) refuse("step: its reducer is no more");
  if (options_.in_backward) refuse("step: backward() is the step, by in_backward");
  if (reducer->is_busy()) refuse("step: inside of a backward");
  const at::NoGradGuard no_grad;
  std::vector<bool> has(members_.size());
  for (bool again = false;; again = true) {
    bool homeless = false;  // before the first backward that is reduced, for example
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const at::Tensor& gradient = members_[m].parameter.grad();
      has[m] = gradient.defined() && members_[m].parameter.requires_grad();
      if (!has[m]) continue;
      const auto place = reducer->place_of(members_[m].index);
      homeless |= place.bucket == nullptr;
      if (place.bucket == nullptr || !place.bucket->deferred) continue;
      const at::Tensor& slot = place.bucket->slots[place.slot];
      if (!is_alias(gradient, slot)) slot.copy_(gradient);
    }
    meet(has);
    if (!homeless) break;
    CONVOY_CHECK(!again, "a gradient without a place in a bucket");
    reducer->sync_gradients();
  }
  run(has);
}

std::vector<ShardedOptimizerBase::Impl::Gradient> ShardedOptimizerBase::Impl::gradients(
    const std::vector<bool>& has) {
  const auto reducer = reducer_.lock();
  const bool sums = reducer->options().reduce.kind() == GradReduce::Kind::kSum;
  const ReduceOp op = sums ? ReduceOp::kSum : ReduceOp::kAvg;
  if (op_ != op) op_ = op;  // not while a thread reads it: it stays the same in a round
  std::vector<Gradient> found;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    if (!has[m]) continue;
    const auto [bucket, slot] = reducer->place_of(members_[m].index);
    CONVOY_CHECK(bucket != nullptr);
    const at::Tensor& place = bucket->slots[slot];
    Gradient gradient{.member = m, .sources = {}, .deferred = bucket->deferred, .kept = {}};
    if (bucket->deferred) {
      const auto offset =
          static_cast<std::size_t>(place.storage_offset() - bucket->buffer.storage_offset()) *
          place.element_size();
      for (const std::byte* data : bucket->peers->data) gradient.sources.push_back(data + offset);
    } else {
      const at::Tensor& home = members_[m].home;
      at::Tensor tensor = options_.in_backward ? place : members_[m].parameter.grad();
      if (tensor.scalar_type() != home.scalar_type() || !tensor.strides().equals(home.strides())) {
        tensor = at::empty_like(home).copy_(tensor);
      }
      gradient.sources = {static_cast<const std::byte*>(tensor.const_data_ptr())};
      gradient.kept = tensor;
    }
    found.push_back(std::move(gradient));
  }
  return found;
}

// After meet().
void ShardedOptimizerBase::Impl::run(const std::vector<bool>& has) {
  try {
    if (must_grow()) make_state(items(rules_));
    auto all = gradients(has);
    double scale = 1;
    bool skips = false;
    if (options_.max_norm > 0 || options_.skip_nonfinite) {
      reduce_in_place(all);
      stats_.norm = norm(all);
      skips = options_.skip_nonfinite && !std::isfinite(stats_.norm);
      scale = clip_scale(stats_.norm, options_.max_norm);
    }
    for (const Gradient& gradient : all) {
      Member& member = members_[gradient.member];
      if (!skips) member.parameter.unsafeGetTensorImpl()->bump_version();
    }
    if (skips) {
      ++stats_.skipped;
    } else {
      count(all);
      ++stats_.steps;
      update(all, scale, Threads::kAll);
    }
    // In backward they are the reducer's.
    for (const Gradient& gradient : all) {
      if (!options_.in_backward) members_[gradient.member].parameter.mutable_grad().reset();
    }
    part(has);
  } catch (...) {
    give_up();
    throw;
  }
}

void ShardedOptimizerBase::Impl::part(const std::vector<bool>& has) {
  if (!shares_) gather_results(has);
  group_.barrier();
}

// In a handler: others wait for this rank. A lost or late one has ended the group already.
void ShardedOptimizerBase::Impl::give_up() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kPeerLost || e.kind() == ErrorKind::kTimeout) return;
  } catch (...) {
  }
  try {
    group_.abort();
  } catch (...) {
  }
}

ShardedOptimizerBase::Stats ShardedOptimizerBase::Impl::stats() const {
  Stats all = stats_;
  all.numbers = static_cast<std::uint64_t>(layout_.numbers_of(group_.rank()));
  all.state_bytes = layout_.state_bytes_of(group_.rank());
  return all;
}

// --- rounds of the reducer ---

void ShardedOptimizerBase::Impl::finish(const std::vector<bool>& used) {
  if (!options_.in_backward) return;
  const at::NoGradGuard no_grad;
  std::vector<bool> has(members_.size());
  bool some = false;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    has[m] = used[members_[m].index] && !done_[m] && members_[m].parameter.requires_grad();
    some |= has[m];
  }
  if (!some && some_done_) {
    ++stats_.steps;
    return;
  }
  meet(has);
  run(has);
}

void ShardedOptimizerBase::Impl::closed() noexcept {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
    trouble_ = nullptr;
  }
  std::fill(done_.begin(), done_.end(), false);
  some_done_ = in_round_ = false;
}

}  // namespace convoy
