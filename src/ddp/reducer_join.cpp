// Reducer: rounds in a Join, where some ranks have no more inputs.
#include "ddp/reducer_join.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/log.h"
#include "ddp/join_context.h"

namespace convoy {

void Reducer::Impl::refuse_hook_in_join() {
  fail(ErrorKind::kInvalidArgument,
       "join: the model has a comm hook, which divides gradients itself; ",
       "divide_by_initial_world_size must be true");
}

void Reducer::Impl::set_join(std::unique_ptr<JoinPort> port) {
  if (port && port->divides_by_live && users_.hook) refuse_hook_in_join();
  join_.set(std::move(port));
  // Ranks do not leave a Join with the same numbers, if one of them threw.
  if (!join_.is_active()) forwards_.close_round();
}

void Reducer::Impl::announce() {
  try {
    join_.announce();
  } catch (...) {
    close(Ending::kFailed);
    observer_.uncount();  // it was none: ranks that have left the Join do not count it
    throw;
  }
}

void Reducer::Impl::shadow_round(const JoinStep& step) {
  const JoinDriver::Shadow shadow(join_, step);
  round_.enter("backward");
  // What is left of the last round is not added to: it need not be set aside.
  for (ParameterState& parameter : parameters_) parameter.reduced = parameter.mixed = false;
  hook_up();
  try {
    open(nullptr);
  } catch (...) {
    if (round_.open) close(Ending::kFailed);
    throw;
  }
  complete(Ending::kGood, {});
}

void Reducer::Impl::add_nothing(std::size_t index) {
  ParameterState& parameter = parameters_[index];
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = tensors_[index].grad();
  if (gradient.defined()) parameter.round.kept = gradient.detach().clone();
  bucket_of(parameter).slots[parameter.slot].zero_();
  parameter.round.ready = true;
}

ReducerInJoin::ReducerInJoin(std::shared_ptr<Reducer::Impl> impl, std::unique_ptr<JoinPort> port)
    : impl_(std::move(impl)) {
  impl_->set_join(std::move(port));
}

void ReducerInJoin::finish() const {
  if (!shadowed_) return;
  for (const at::Tensor& parameter : impl_->tensors()) parameter.mutable_grad().reset();
}

void ReducerInJoin::shadow(const JoinStep& step) {
  shadowed_ = true;
  try {
    impl_->shadow_round(step);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kRemote && error.kind() != ErrorKind::kInvalidArgument) throw;
    log_warn("while this rank has no inputs: ", error.what());
    throw JoinStepFailed();  // NOLINT(bugprone-std-exception-baseclass)
  }
}

namespace {

class ReducerJoinHook final : public JoinHook {
 public:
  ReducerJoinHook(const Reducer& reducer, std::unique_ptr<JoinPort> port)
      : reducer_(reducer), part_(ReducerAccess::impl(reducer), std::move(port)) {}

  void pre_hook() override { part_.leave(); }
  void main_hook(const JoinStep& step) override { part_.shadow(step); }
  void post_hook(const JoinEnd& end) override {
    broadcast_coalesced(reducer_.group(), reducer_.parameters(), {.root = end.last_joiner});
    part_.finish();
  }

 private:
  const Reducer& reducer_;
  ReducerInJoin part_;
};

}  // namespace

std::unique_ptr<JoinHook> Reducer::join_hook(const JoinOptions& options) {
  auto port = std::make_unique<JoinPort>();
  port->announce = [this] { return notify_join_context().value(); };
  port->finish = [](const JoinStep&) {};
  port->defers = [group = group()] { return has_sync_batch_norms(group); };
  port->divides_by_live = !options.divide_by_initial_world_size;
  return std::make_unique<ReducerJoinHook>(*this, std::move(port));
}

}  // namespace convoy
