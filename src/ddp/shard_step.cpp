// ShardedOptimizer: a step of all ranks.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "coll/group.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "convoy/backend.h"
#include "ddp/sharded_optimizer_impl.h"
#include "tensor/memory.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kShardedName, ": ", text...);
}

// True if other ranks can add it up where it is.
bool can_be_read(const at::Tensor& gradient, const at::Tensor& home) {
  return gradient.layout() == c10::kStrided && gradient.scalar_type() == home.scalar_type() &&
         gradient.sizes().equals(home.sizes()) && gradient.strides().equals(home.strides()) &&
         is_shared_memory(gradient);
}

}  // namespace

// What ranks tell each other:
//   0  1: ready, 2: not
//   1  hash of the options
//   9  for each member 1 if it has a gradient
//      for each member segment and offset of its gradient, 0 if that is in its bucket
// Returns where the gradients of all ranks are.
std::vector<ShardedOptimizerBase::Impl::Places> ShardedOptimizerBase::Impl::meet(
    const std::vector<bool>& has, const Places& places) {
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
  constexpr std::size_t kHead = 9, kWord = sizeof(std::uint64_t), kPlace = 2 * kWord;
  const std::size_t length = kHead + has.size() * (1 + kPlace);
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(length)}, at::kByte);
  auto* const bytes = mine.mutable_data_ptr<std::uint8_t>();
  bytes[0] = error.empty() ? 1 : 2;
  const std::uint64_t hash = options_hash();
  std::memcpy(bytes + 1, &hash, sizeof(hash));
  for (std::size_t m = 0; m < has.size(); ++m) {
    bytes[kHead + m] = has[m];
    auto* const entry = bytes + kHead + has.size() + m * kPlace;
    if (places.empty()) continue;
    std::memcpy(entry, &places[m].segment, kWord);
    std::memcpy(entry + kWord, &places[m].offset, kWord);
  }
  std::vector<Places> all_places;
  const at::Tensor all = at::empty({group_.size(), mine.numel()}, at::kByte);
  group_.all_gather_single(all.view({-1}), mine);
  if (!error.empty()) throw Error(ErrorKind::kInvalidArgument, error);
  for (int r = 0; r < group_.size(); ++r) {
    const auto* const theirs = all[r].const_data_ptr<std::uint8_t>();
    auto& found = all_places.emplace_back(has.size());
    for (std::size_t m = 0; m < has.size(); ++m) {
      const auto* const entry = theirs + kHead + has.size() + m * kPlace;
      std::memcpy(&found[m].segment, entry, kWord);
      std::memcpy(&found[m].offset, entry + kWord, kWord);
    }
    if (theirs[0] != 1) refuse("rank ", r, " has refused the step: see its own error");
    if (std::memcmp(theirs + 1, bytes + 1, sizeof(hash)) != 0) {
      refuse("rank ", r, " has other options in its groups than rank ", group_.rank());
    }
    for (std::size_t m = 0; m < has.size(); ++m) {
      if ((theirs[kHead + m] != 0) == has[m]) continue;
      refuse("rank ", has[m] ? r : group_.rank(), " has no gradient for ", name_of(members_[m]),
             ", but rank ", has[m] ? group_.rank() : r, " has");
    }
  }
  return all_places;
}

void ShardedOptimizerBase::Impl::step() {
  const auto reducer = reducer_.lock();
  if (!reducer) refuse("step: its reducer is no more");
  if (options_.in_backward) refuse("step: backward() is the step, by in_backward");
  if (reducer->is_busy()) refuse("step: inside of a backward");
  const at::NoGradGuard no_grad;
  std::vector<bool> has(members_.size());
  std::vector<Places> all_places;
  for (bool again = false;; again = true) {
    Places places(members_.size());
    bool homeless = false;  // before the first backward that is reduced, for example
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const at::Tensor& gradient = members_[m].parameter.grad();
      has[m] = gradient.defined() && members_[m].parameter.requires_grad();
      if (!has[m]) continue;
      const auto place = reducer->place_of(members_[m].index);
      homeless |= place.bucket == nullptr;
      if (place.bucket == nullptr || !place.bucket->deferred) continue;
      const at::Tensor& slot = place.bucket->slots[place.slot];
      if (is_alias(gradient, slot)) continue;
      if (can_be_read(gradient, members_[m].home)) {
        places[m] = shm::Fabric::instance().locate(gradient.const_data_ptr(), gradient.nbytes());
      }
      if (!places[m]) slot.copy_(gradient);
    }
    all_places = meet(has, places);
    if (!homeless) break;
    CONVOY_CHECK(!again, "a gradient without a place in a bucket");
    reducer->sync_gradients();
  }
  run(has, all_places);
}

std::vector<ShardedOptimizerBase::Impl::Gradient> ShardedOptimizerBase::Impl::gradients(
    const std::vector<bool>& has, const std::vector<Places>& places) {
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
      const auto me = static_cast<std::size_t>(group_.rank());
      for (std::size_t r = 0; r < bucket->peers->data.size(); ++r) {
        if (places.empty() || !places[r][m]) {
          gradient.sources.push_back(bucket->peers->data[r] + offset);
        } else if (r == me) {
          gradient.kept = members_[m].parameter.grad();  // others read it until all are done
          gradient.sources.push_back(static_cast<const std::byte*>(gradient.kept.const_data_ptr()));
        } else {
          gradient.sources.push_back(find(static_cast<int>(r), places[r][m], place.nbytes()));
        }
      }
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

// Memory of a rank's in this process.
const std::byte* ShardedOptimizerBase::Impl::find(int rank, const shm::Location& location,
                                                  std::size_t bytes) const {
  auto* const backend = dynamic_cast<ConvoyBackend*>(group_.backend().get());
  CONVOY_CHECK(backend != nullptr);
  const auto mesh = coll::mesh_of(*backend->group().medium());
  CONVOY_CHECK(mesh != nullptr);
  return mesh->resolve(rank, location, bytes, Deadline::after(group_.timeout()));
}

// After meet().
void ShardedOptimizerBase::Impl::run(const std::vector<bool>& has,
                                     const std::vector<Places>& places) {
  try {
    if (must_grow()) make_state(items(rules_));
    auto all = gradients(has, places);
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
  run(has, meet(has, {}));
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
