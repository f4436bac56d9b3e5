// ShardedOptimizer: a step of all ranks.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "base/wire.h"
#include "coll/group.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "convoy/backend.h"
#include "ddp/agreement.h"
#include "ddp/reduce_bucket.h"
#include "optim/sharded_optimizer_impl.h"
#include "tensor/memory.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

// How much longer than the group's patience this rank's own thread may take.
constexpr std::chrono::seconds kGrace(30);

// What all ranks find.
template <class... Text>
[[noreturn]] void refuse_all(const Text&... text) {
  throw AgreedError(ErrorKind::kInvalidArgument, concat(kShardedName, ": ", text...));
}

// Its memory holds the conjugates of its values, or their negatives; or it has none.
bool is_lazy(const at::Tensor& gradient) {
  return gradient.is_conj() || gradient.is_neg() || gradient._is_zerotensor();
}

// True if other ranks can add it up where it is. For norms sums are written there: it must be
// nobody else's.
bool can_be_read(const at::Tensor& gradient, const at::Tensor& home) {
  return gradient.scalar_type() == home.scalar_type() &&
         gradient.strides().equals(home.strides()) && is_shared_memory(gradient) &&
         gradient.storage().use_count() == 1 && !is_lazy(gradient);
}

}  // namespace

// Options of this step, which users may have changed.
void ShardedOptimizerBase::Impl::take_rules() {
  if (owner_->param_groups().size() != rules_.size()) {
    refuse_sharded("groups cannot be added to it; make another one");
  }
  auto now = rules();
  for (const OptimizerRule& rule : now) check_rule(kShardedName, rule);
  rules_ = std::move(now);
}

// What ranks tell each other:
//   0  1: ready, 2: not, 3: gradients must be reduced first
//   1  hash of the options
//   9  for each member 1 if it has a gradient
//      for each member segment and offset of its gradient, 0 if that is in its bucket
// Returns where the gradients of all ranks are.
std::optional<std::vector<ShardedOptimizerBase::Impl::Places>> ShardedOptimizerBase::Impl::meet(
    Own own) {
  const std::vector<bool>& has = own.has;
  try {
    take_rules();
    for (ShardedParameter& member : members_) hold(member);
  } catch (const std::exception& e) {  // others wait for this rank below
    if (own.error.empty()) own.error = e.what();
  }
  const std::size_t length = 1 + sizeof(std::uint64_t) + has.size() * (1 + sizeof(shm::Location));
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(length)}, at::kByte);
  const std::uint64_t hash = options_hash();
  WireWriter out(wire_bytes(mine));
  out.put(static_cast<std::uint8_t>(!own.error.empty() ? 2 : own.unreduced ? 3 : 1));
  out.put(hash);
  for (const bool one : has) out.put(std::uint8_t{one});
  for (const shm::Location& place : own.places) out.put(place);
  std::vector<Places> all_places;
  bool unreduced = false;
  const at::Tensor all = at::empty({group_.size(), mine.numel()}, at::kByte);
  group_.all_gather_single(all.view({-1}), mine);
  if (!own.error.empty()) throw AgreedError(ErrorKind::kInvalidArgument, own.error);
  for (int r = 0; r < group_.size(); ++r) {
    WireReader in(wire_bytes(all[r]), "step");
    const auto state = in.take<std::uint8_t>();
    const auto their_hash = in.take<std::uint64_t>();
    const auto theirs = in.take(has.size());
    for (auto& place : all_places.emplace_back(has.size())) place = in.take<shm::Location>();
    unreduced |= state == 3;
    if (state == 2) refuse_all("rank ", r, " has refused the step: see its own error");
    if (their_hash != hash) {
      refuse_all("rank ", r, " has other options in its groups than rank ", group_.rank());
    }
    for (std::size_t m = 0; m < has.size(); ++m) {
      if ((theirs[m] != 0) == has[m]) continue;
      refuse_all("rank ", has[m] ? r : group_.rank(), " has no gradient for ", name_of(members_[m]),
                 ", but rank ", has[m] ? group_.rank() : r, " has");
    }
  }
  if (unreduced) return std::nullopt;
  return all_places;
}

// In the buckets that are not reduced in backward, gradients are made ready for other ranks.
ShardedOptimizerBase::Impl::Own ShardedOptimizerBase::Impl::look_at_gradients(
    const Reducer::Impl& reducer) const {
  Own own{.has = std::vector<bool>(members_.size()), .places = Places(members_.size())};
  try {
    if (stuck_) fail(ErrorKind::kTimeout, "the update thread of an earlier step is still running");
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const ShardedParameter& member = members_[m];
      const at::Tensor& gradient = member.parameter.grad();
      own.has[m] = gradient.defined() && member.parameter.requires_grad();
      if (!own.has[m]) continue;
      if (gradient.layout() != c10::kStrided || !gradient.device().is_cpu() ||
          !gradient.sizes().equals(member.home.sizes())) {
        refuse_sharded("the gradient of ", name_of(member), " is ", gradient.layout(),
                       ", of sizes ", gradient.sizes(), ", not strided of sizes ",
                       member.home.sizes());
      }
      const auto place = reducer.place_of(member.index);
      // Before the first backward that is reduced, for example.
      own.unreduced |= place.bucket == nullptr ||
                       (!place.bucket->deferred && reducer.is_unreduced(member.index));
      if (place.bucket == nullptr || !place.bucket->deferred) continue;
      const at::Tensor& slot = place.bucket->slots[place.slot];
      if (is_alias(gradient, slot)) continue;
      if (can_be_read(gradient, member.home)) {
        own.places[m] =
            shm::Fabric::instance().locate(gradient.const_data_ptr(), gradient.nbytes());
      }
      if (!own.places[m]) slot.copy_(gradient);
    }
  } catch (const std::exception& e) {  // others wait in meet()
    own.error = e.what();
  }
  return own;
}

void ShardedOptimizerBase::Impl::step(const std::string& error) {
  const auto reducer = reducer_.lock();
  if (!reducer) refuse_sharded("step: its reducer no longer exists");
  if (options_.in_backward) refuse_sharded("step: backward() is the step, by in_backward");
  if (reducer->is_busy()) refuse_sharded("step: inside of a backward");
  const at::NoGradGuard no_grad;
  for (bool again = false;; again = true) {
    Own own = look_at_gradients(*reducer);
    if (!error.empty()) own.error = concat(kShardedName, ": ", error);
    if (const auto places = meet(own)) return run(own.has, *places);
    CONVOY_CHECK(!again, "gradients that cannot be reduced");
    reducer->sync_gradients();
  }
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
      if (tensor.scalar_type() != home.scalar_type() || !tensor.strides().equals(home.strides()) ||
          is_lazy(tensor)) {
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
  std::vector<Gradient> all;
  try {
    if (must_grow()) make_state(items(rules_));
    all = gradients(has, places);
    double scale = 1;
    bool skips = false;
    if (options_.max_norm > 0 || options_.skip_nonfinite) {
      reduce_in_place(all);
      stats_.norm = norm(all);
      skips = options_.skip_nonfinite && !std::isfinite(stats_.norm);
      scale = clip_scale(stats_.norm, options_.max_norm);
    }
    for (const Gradient& gradient : all) {
      ShardedParameter& member = members_[gradient.member];
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
    for (const Gradient& gradient : all) left_behind_.push_back(gradient.kept);
    give_up(group_, "a step of the sharded optimizer");
    throw;
  }
}

void ShardedOptimizerBase::Impl::part(const std::vector<bool>& has) {
  if (!shares_) gather_results(has);
  group_.barrier();
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
    has[m] = used[members_[m].index] && !round_.done[m] && members_[m].parameter.requires_grad();
    some |= has[m];
  }
  if (!some && round_.some_done) {
    ++stats_.steps;
    return;
  }
  const auto places = meet({.has = has});
  CONVOY_CHECK(places.has_value());
  run(has, *places);
}

// What the thread waits for has the group's patience; all else that it does is arithmetic.
ShardedOptimizerBase::Impl::Idle ShardedOptimizerBase::Impl::wait_until_idle() {
  std::unique_lock lock(mutex_);
  const bool idle =
      changed_.wait_for(lock, group_.timeout() + kGrace, [&] { return queue_.empty() && !busy_; });
  return idle ? Idle::kYes : Idle::kNo;
}

void ShardedOptimizerBase::Impl::drain() {
  if (wait_until_idle() == Idle::kNo) {
    fail(ErrorKind::kTimeout, kShardedName, ": the updates of this backward do not end");
  }
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = trouble_;
  }
  if (error) std::rethrow_exception(error);
}

void ShardedOptimizerBase::Impl::closed() noexcept {
  try {
    if (stuck_) return;
    if (wait_until_idle() == Idle::kNo) {
      abort_because(group_, "its sharded optimizer ended");  // whatever it waits for
      stuck_ = wait_until_idle() == Idle::kNo;
      log_error(kShardedName, ": its thread has ", stuck_ ? "not " : "",
                "come back after an abort");
      if (stuck_) return;
    }
    const std::lock_guard lock(mutex_);
    trouble_ = nullptr;
  } catch (const std::exception& e) {
    log_error(kShardedName, ": ", e.what());
    stuck_ = true;
    return;
  }
  std::fill(round_.done.begin(), round_.done.end(), false);
  round_.some_done = round_.begun = false;
}

}  // namespace convoy
