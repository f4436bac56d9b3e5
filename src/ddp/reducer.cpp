#include "convoy/reducer.h"

#include <utility>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/mixed_precision.h"
#include "ddp/reducer_impl.h"

namespace convoy {
namespace {

// What is wrong with options that a reducer is given without a module; empty: nothing.
std::string module_only(const DdpOptions& options) {
  const auto mixed = options.mixed_precision.value_or(MixedPrecision{});
  const char* const wrong = !options.ignore.empty() ? "ignore"
                            : !options.delay_all_reduce_named_params.empty()
                                ? "delay_all_reduce_named_params"
                            : !options.parameter_groups.empty() ? "parameter_groups"
                            : mixed.param_dtype                 ? "mixed_precision.param_dtype"
                            : mixed.buffer_dtype                ? "mixed_precision.buffer_dtype"
                                                                : nullptr;
  if (wrong != nullptr) return concat("option ", wrong, " needs a module; a Reducer has none");
  try {
    check_mixed_precision(mixed);
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

ReducerSetup setup_of(const DdpOptions& options, const ParameterTraits& traits) {
  ReducerSetup made(options);
  made.traits = traits;
  made.error = module_only(options);
  return made;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, ProcessGroup group, const DdpOptions& options,
                 const ParameterTraits& traits)
    : Reducer(std::make_shared<Impl>(std::move(parameters), std::move(group),
                                     setup_of(options, traits))) {}

Reducer::Reducer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->hook_up();
  impl_->enlist();
}

Reducer::~Reducer() {
  if (impl_) impl_->take_hooks_off();
}
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&& other) noexcept {
  if (this != &other) {
    if (impl_) impl_->take_hooks_off();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

std::vector<at::Tensor> Reducer::prepare_for_backward(at::TensorList outputs, Forward forward) {
  return impl_->after_forward(outputs, forward);
}
void Reducer::before_forward() { impl_->before_forward(); }
bool Reducer::is_paused() const { return impl_->is_paused(); }
void Reducer::sync_gradients() {
  told_from(group(), "sync_gradients", [&] {
    impl_->check_process("sync_gradients");
    impl_->sync_gradients();
  });
}
void Reducer::register_comm_hook(CommHook hook) {
  told_from(group(), "register_comm_hook", [&] { impl_->register_comm_hook(std::move(hook)); });
}
void Reducer::register_consumer(GradConsumer consumer) {
  told_from(group(), "register_consumer", [&] { impl_->register_consumer(std::move(consumer)); });
}
void Reducer::watch_backward(std::function<void()> begins, std::function<void(BackwardEnd)> ends,
                             Replicas replicas) {
  impl_->watch_backward(std::move(begins), std::move(ends), std::move(replicas));
}
int Reducer::update_process_group(ProcessGroup group) {
  told_from(this->group(), "update_process_group", [&] {
    if (!group)
      fail(ErrorKind::kInvalidArgument,
           "the new group is empty; pass that of shrink(), init() or new_group()");
    impl_->prepare_change();
  });
  // Collective: when it is there, all its ranks have ended what they did in the old group.
  auto made = std::make_shared<Impl>(impl_->tensors(), std::move(group), impl_->options());
  impl_->leave_group();
  impl_->take_hooks_off();
  auto old = std::exchange(impl_, std::move(made));
  try {
    impl_->hook_up();
    impl_->enlist();
    return impl_->take_over(*old);
  } catch (...) {  // as before, so that it can be tried with yet another one
    impl_->take_hooks_off();
    impl_ = std::move(old);
    impl_->hook_up();
    throw;
  }
}
void Reducer::set_reduce(GradReduce reduce) {
  told_from(group(), "set_reduce", [&] { impl_->set_reduce(reduce); });
}
const std::vector<at::Tensor>& Reducer::parameters() const { return impl_->tensors(); }
const ProcessGroup& Reducer::group() const { return impl_->group(); }
std::vector<bool> Reducer::used() const { return impl_->used(); }
const ReducerStats& Reducer::stats() const { return impl_->stats(); }

std::vector<std::vector<std::size_t>> Reducer::buckets() const {
  std::vector<std::vector<std::size_t>> lists;
  for (const Bucket& bucket : impl_->buckets()) lists.push_back(bucket.parameters);
  return lists;
}

Reducer::NoSync::NoSync(Reducer& reducer, bool on) : impl_(on ? reducer.impl_ : nullptr) {
  if (impl_) impl_->pause(1);
}
Reducer::NoSync::~NoSync() {
  if (impl_) impl_->pause(-1);
}

}  // namespace convoy
