// DistributedDataParallel in a Join. Rounds are its steps, announced when they begin: whether a
// backward is reduced is known only then. Buffers are synchronised at the end of each round instead
// of before the next forward, so that one message a step is enough.
#include <ATen/Functions.h>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/ddp_core_impl.h"
#include "ddp/join_context.h"
#include "ddp/reducer_join.h"

namespace convoy {

class DdpJoinHook final : public JoinBuffersHook {
 public:
  DdpJoinHook(DdpCore::Impl& core, std::unique_ptr<JoinPort> port)
      : core_(core), part_(ReducerAccess::impl(core.reducer()), std::move(port)) {}
  ~DdpJoinHook() override { core_.join_.reset(); }
  DdpJoinHook(const DdpJoinHook&) = delete;
  DdpJoinHook& operator=(const DdpJoinHook&) = delete;

  void pre_hook() override { part_.leave(); }
  void main_hook(const JoinStep& step) override { part_.shadow(step); }
  void buffers_hook(const JoinStep& step) override { core_.sync_buffers_from(step.live.front()); }
  void post_hook(const JoinEnd& end) override {
    std::vector<at::Tensor> all = core_.reducer().parameters();
    if (core_.options_.forward_sync_buffers) {
      for (const auto& [name, buffer] : core_.buffers()) all.push_back(buffer);
    }
    broadcast_coalesced(core_.group_, all, {.root = end.last_joiner});
    part_.finish();
  }

 private:
  DdpCore::Impl& core_;
  ReducerInJoin part_;
};

std::shared_ptr<JoinContext> DdpCore::Impl::join() const {
  auto context = join_.lock();
  if (context && !context->is_live()) context.reset();
  return context;
}

std::unique_ptr<JoinHook> DdpCore::Impl::join_hook(const Joinable& self,
                                                   const JoinOptions& options) {
  if (!others_.empty()) {
    fail(ErrorKind::kInvalidArgument, head_of(group_, "join"),
         "a model with parameter_groups cannot be joined: their ranks do not know of each other's "
         "inputs");
  }
  auto port = std::make_unique<JoinPort>();
  const auto context = JoinContext::of(group_);
  const bool syncs = options_.forward_sync_buffers && !context->throws_early();
  port->announce = [weak = std::weak_ptr(context), &self] {
    const auto join = weak.lock();
    if (!join->throws_early()) return join->notify(self);
    return JoinStep{.live = join->everybody()};  // told before forward: nobody is missing
  };
  port->finish = [this, syncs](const JoinStep& step) {
    if (syncs) sync_buffers_from(step.live.front());
  };
  port->defers = [group = group_] { return has_sync_batch_norms(group); };
  port->divides_by_live = !options.divide_by_initial_world_size;
  auto hook = std::make_unique<DdpJoinHook>(*this, std::move(port));
  join_ = context;
  join_self_ = &self;
  if (syncs) sync_buffers_from(0);  // for the first forward
  return hook;
}

// --- a Join of somebody else's ---

// Whoever conducts it knows of forwards only, and not whether their backwards are reduced: that is
// exchanged here, with who is live, as one byte of each rank. Buffers go at the ends of rounds, as
// in our own.
class JoinPart::Impl {
 public:
  Impl(DdpCore::Impl& core, const JoinOptions& options)
      : core_(core), part_(ReducerAccess::impl(core.reducer()), port_of(core, options, step_)) {}

  void step() {
    const bool reduces = !core_.reducer().is_paused();
    exchange(reduces ? State::kReduces : State::kPaused);
  }

  void shadow() {
    if (exchange(State::kJoined) != State::kReduces) return;
    try {
      part_.shadow(*step_);
    } catch (const JoinStepFailed&) {
      fail(ErrorKind::kRemote, head(), "a backward of the ranks that have inputs failed");
    }
  }

  void finish(bool is_last_joiner) {
    const at::Tensor last = at::full({1}, is_last_joiner ? core_.group_.rank() : -1, at::kLong);
    core_.group_.all_reduce(last, {.op = ReduceOp::kMax});
    const auto root = static_cast<int>(last.item<std::int64_t>());
    if (root < 0) fail(ErrorKind::kInvalidArgument, head(), "no rank was in the last step");
    std::vector<at::Tensor> all = core_.reducer().parameters();
    if (core_.options_.forward_sync_buffers) {
      for (const auto& [name, buffer] : core_.buffers()) all.push_back(buffer);
    }
    broadcast_coalesced(core_.group_, all, {.root = root});
    part_.finish();
  }

 private:
  enum class State : std::uint8_t { kJoined, kPaused, kReduces };

  static std::unique_ptr<JoinPort> port_of(DdpCore::Impl& core, const JoinOptions& options,
                                           const std::shared_ptr<JoinStep>& step) {
    auto port = std::make_unique<JoinPort>();
    port->announce = [step] { return *step; };
    port->finish = [&core](const JoinStep& done) {
      if (core.options_.forward_sync_buffers) core.sync_buffers_from(done.live.front());
    };
    port->defers = [] { return false; };
    port->divides_by_live = !options.divide_by_initial_world_size;
    port->is_part = true;
    return port;
  }

  std::string head() const {
    return concat("join, group \"", core_.group_.name(), "\", rank ", core_.group_.rank(), " of ",
                  core_.group_.size(), ": ");
  }

  // What those do that have inputs.
  State exchange(State mine) {
    const at::Tensor all = at::zeros({core_.group_.size()}, at::kByte);
    core_.group_.all_gather_single(all, at::full({1}, static_cast<int>(mine), at::kByte));
    const auto* const states = all.const_data_ptr<std::uint8_t>();
    State common = State::kJoined;
    step_->live.clear();
    for (int r = 0; r < core_.group_.size(); ++r) {
      const auto state = static_cast<State>(states[r]);
      if (state == State::kJoined) continue;
      if (!step_->live.empty() && state != common) {
        const int first = step_->live.front();
        const bool first_pauses = common == State::kPaused;
        fail(ErrorKind::kInvalidArgument, head(), "ranks are out of step: rank ",
             first_pauses ? first : r, " is inside of no_sync(), rank ", first_pauses ? r : first,
             " is not");
      }
      common = state;
      step_->live.push_back(r);
    }
    if (!std::exchange(begun_, true) && core_.options_.forward_sync_buffers) {
      core_.sync_buffers_from(0);
    }
    return common;
  }

  DdpCore::Impl& core_;
  const std::shared_ptr<JoinStep> step_ = std::make_shared<JoinStep>();
  ReducerInJoin part_;
  bool begun_ = false;
};

JoinPart::JoinPart(DdpCore& joined, const JoinOptions& options) {
  DdpCore::Impl& core = *joined.impl_;
  if (!core.others_.empty()) {
    fail(ErrorKind::kInvalidArgument, head_of(core.group_, "join"),
         "a model with parameter_groups cannot be joined: their ranks do not know of each other's "
         "inputs");
  }
  if (core.join()) {
    fail(ErrorKind::kInvalidArgument, head_of(core.group_, "join"),
         "the model is part of another Join already; end that one first");
  }
  impl_ = std::make_unique<Impl>(core, options);
}
JoinPart::~JoinPart() = default;
void JoinPart::step() { impl_->step(); }
void JoinPart::shadow() { impl_->shadow(); }
void JoinPart::finish(bool is_last_joiner) { impl_->finish(is_last_joiner); }

}  // namespace convoy
