#include <algorithm>
#include <exception>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/ddp_core_impl.h"
#include "ddp/join_context.h"
#include "ddp/mixed_precision.h"
#include "ddp/module_parameters.h"
#include "ddp/norm_group.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {

DdpCore::Impl::Impl(std::shared_ptr<DdpModule> module, ProcessGroup group,
                    const DdpOptions& options)
    : module_(std::move(module)), group_(std::move(group)), options_(options) {
  if (!group_)
    fail(ErrorKind::kInvalidArgument,
         "DistributedDataParallel: the group is empty; pass that of convoy::init() or new_group()");
  if (!module_) {
    fail(ErrorKind::kInvalidArgument, head_of(group_, "DistributedDataParallel"),
         "the module is nullptr; pass one");
  }
  const PurposeScope scope({.what = "the constructor of DistributedDataParallel"});
  auto found = find_parameters(*module_, options_);
  const auto mixed = options_.mixed_precision.value_or(MixedPrecision{});
  if (found.error.empty()) found.error = error_in(mixed);
  for (const auto& [name, buffer] : buffers()) {
    if (!found.error.empty() || !buffer.is_meta()) continue;
    found.error = concat("buffer ", name, " is on device meta and has no values; give the module ",
                         "memory first (to_empty(), then load or initialise it)");
  }
  found.must_agree.push_back(describe(mixed));
  auto more = setup(found);
  more.must_agree = std::move(found.must_agree);
  more.error = std::move(found.error);
  reducer_ = ReducerAccess::make(found.parameters, group_, std::move(more));
  if (options_.init_sync && group_.size() > 1) {
    std::vector<at::Tensor> all = found.parameters;
    for (const auto& [name, buffer] : buffers()) all.push_back(buffer);
    broadcast_coalesced(group_, all);
  }
  if (mixed.buffer_dtype) cast_buffers(*mixed.buffer_dtype);
  if (mixed.param_dtype) {
    copies_ = std::make_shared<LowPrecisionCopies>(found.parameters, *mixed.param_dtype);
    // What is reduced is cast on its way back.
    reducer_->watch_backward([copies = copies_] { copies->lower_again(); },
                             [copies = copies_](Reducer::BackwardEnd end) {
                               copies->restore(end == Reducer::BackwardEnd::kAdds
                                                   ? CastGradients::kAll
                                                   : CastGradients::kSparse);
                             },
                             [copies = copies_] { return copies->originals(); });
  }
  make_parameter_groups();
  last_ = wrapped_ = module_->parameters();
}

// What is wrong with the types; empty: nothing.
std::string DdpCore::Impl::error_in(const MixedPrecision& mixed) const {
  if (options_.mixed_precision && !options_.parameter_groups.empty()) {
    return "mixed_precision and parameter_groups exclude each other";
  }
  try {
    check_mixed_precision(mixed);
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

// What its reducers are made with.
ReducerSetup DdpCore::Impl::setup(ModuleParameters& found) const {
  ReducerSetup made{options_};
  made.parameter_groups.clear();  // these groups are the model's affair
  made.traits = {.names = std::move(found.names),
                 .sparse = std::move(found.sparse),
                 .delayed = std::move(found.delayed)};
  return made;
}

// Their backwards are the same ones: outputs pass a sink of each reducer, in one order on all
// ranks.
void DdpCore::Impl::make_parameter_groups() {
  for (const ParameterGroup& other : options_.parameter_groups) {
    auto found = find_parameters(*module_, options_, &other);
    auto more = setup(found);
    more.traits.delayed.clear();
    others_.push_back(ReducerAccess::make(found.parameters, other.group, std::move(more)));
    if (options_.init_sync) broadcast_coalesced(other.group, found.parameters);
    ReducerAccess::impl(*reducer_)->follow(ReducerAccess::impl(*others_.back()));
  }
}

NamedTensors DdpCore::Impl::buffers() const {
  NamedTensors found = module_->buffers();
  std::erase_if(found, [this](const auto& buffer) {
    return !buffer.second.defined() || std::find(options_.ignore.begin(), options_.ignore.end(),
                                                 buffer.first) != options_.ignore.end();
  });
  return found;
}

void DdpCore::Impl::cast_buffers(at::ScalarType type) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers()) {
    if (is_cast(buffer, type)) buffer.set_data(buffer.detach().to(type));
  }
}

std::optional<at::ScalarType> DdpCore::Impl::input_type() const {
  if (!copies_ || !options_.mixed_precision->cast_forward_inputs) return std::nullopt;
  return options_.mixed_precision->param_dtype;
}

void DdpCore::Impl::before_forward() {
  enter();
  // Without a backward to come, after_forward() puts the parameters back.
  lowered_here_ = copies_ && copies_->lower();
  in_module_ = at::GradMode::is_enabled();
  if (!in_module_) return;
  try {
    check_parameters("forward");
  } catch (...) {
    forward_failed();
    throw;
  }
  try {
    reducer_->before_forward();
    for (const auto& other : others_) other->before_forward();
    ReducerAccess::impl(*reducer_)->timeline().forward_begins();
    meet_others(BufferSync::kBeforeForward);
  } catch (...) {
    undo_forward();
    throw;
  }
}

void DdpCore::Impl::after_forward(const std::vector<at::Tensor*>& outputs) {
  if (!at::GradMode::is_enabled()) {
    leave();
    if (lowered_here_) copies_->restore();
    return;
  }
  try {
    check_parameters("forward");  // it may have made some
  } catch (...) {
    forward_failed();
    throw;
  }
  in_module_ = false;
  leave();
  std::vector<at::Tensor> tensors;
  tensors.reserve(outputs.size());
  for (const at::Tensor* output : outputs) tensors.push_back(*output);
  // One rank may evaluate alone; but a model in eval mode can be trained, too.
  const auto forward =
      module_->is_training() ? Reducer::Forward::kInStep : Reducer::Forward::kAside;
  try {
    ReducerAccess::impl(*reducer_)->timeline().forward_ends();
    meet_others(BufferSync::kAfterForward);
    tensors = reducer_->prepare_for_backward(tensors, forward);
    for (const auto& other : others_) tensors = other->prepare_for_backward(tensors, forward);
  } catch (...) {
    if (lowered_here_) copies_->restore();
    throw;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) *outputs[i] = std::move(tensors[i]);
}

// SyncBatchNorms weigh gradients as the model does in whose forward they are called.
void DdpCore::Impl::enter() {
  enter_forward(ReducerAccess::impl(*reducer_)->norm_weight());
  ++forwards_;
}

void DdpCore::Impl::leave() {
  if (forwards_ == 0) return;
  --forwards_;
  leave_forward();
}

void DdpCore::Impl::undo_forward() {
  in_module_ = false;
  leave();
  if (lowered_here_) copies_->restore();
}

void DdpCore::Impl::forward_failed() {
  std::string why = "an exception not derived from std::exception";
  try {
    if (const auto thrown = std::current_exception()) std::rethrow_exception(thrown);
    why = "an exception";
  } catch (const std::exception& e) {
    why = first_line(e);
  } catch (...) {
  }
  forward_failed(why);
}

// Others may wait for this rank in a SyncBatchNorm of this forward, or in the backward.
void DdpCore::Impl::forward_failed(const std::string& why) {
  const bool owes = in_module_ && is_in_step();
  undo_forward();
  if (!owes) return;
  const std::string line = why.substr(0, why.find('\n'));
  for (const auto& other : others_) ReducerAccess::impl(*other)->owe(line);
  ReducerAccess::impl(*reducer_)->owe(line);
  abandon_norms(group_);
}

// True if all ranks run this forward, and its backward. In a Join ranks have different numbers of
// batches.
bool DdpCore::Impl::is_in_step() const {
  if (!module_->is_training() || group_.size() == 1) return false;
  const auto& reducer = ReducerAccess::impl(*reducer_);
  if (reducer->is_paused() || reducer->is_in_part()) return false;
  const auto context = join();
  return !context || context->throws_early();  // otherwise rounds do it: ddp_join.cpp
}

// Buffers become rank 0's; and ranks that are somewhere else are told.
void DdpCore::Impl::meet_others(BufferSync when) {
  const auto& reducer = ReducerAccess::impl(*reducer_);
  const bool in_step = is_in_step();
  if (when == BufferSync::kBeforeForward) {
    // As their backwards come: the last one's sinks are passed first.
    for (auto other = others_.rbegin(); other != others_.rend() && in_step; ++other) {
      ReducerAccess::impl(**other)->meet_in_forward("forward", nullptr);
    }
    const auto context = join();
    if (context && context->throws_early() && module_->is_training()) {
      const auto notify = [&] { context->notify(*join_self_); };
      if (in_step) {
        reducer->meet_in_forward("forward", notify);
      } else {
        notify();
      }
    }
  }
  if (!in_step) return;
  NamedTensors found;
  if (options_.forward_sync_buffers && when == options_.buffer_sync) found = buffers();
  if (!found.empty()) {
    reducer->meet_in_forward("forward", [&] { sync_buffers_from(0, found); });
  } else if (when == BufferSync::kBeforeForward) {
    reducer->meet_in_forward("forward", nullptr);
  }
}

void DdpCore::Impl::sync_buffers() {
  const NamedTensors found = buffers();
  if (found.empty() || group_.size() == 1) return;
  const auto context = join();
  if (!context || context->throws_early()) {
    const auto& reducer = ReducerAccess::impl(*reducer_);
    return reducer->meet_in_forward("sync_buffers", [&] { sync_buffers_from(0, found); });
  }
  sync_buffers_from(context->call_buffers(*join_self_).live.front(), found);
}

void DdpCore::Impl::sync_buffers_from(int root) {
  if (group_.size() > 1) sync_buffers_from(root, buffers());
}

void DdpCore::Impl::sync_buffers_from(int root, const NamedTensors& found) {
  if (found.empty()) return;
  if (buffer_hook_) return buffer_hook_(group_, found);
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : found) tensors.push_back(buffer);
  broadcast_buffers(group_, tensors, root, module_->statistics(), staging_);
}

void DdpCore::Impl::set_buffer_hook(BufferHook hook, BufferSync when) {
  if (hook && !buffer_hook_) {
    buffer_hook_ = std::move(hook);
    options_.buffer_sync = when;
    return;
  }
  fail(ErrorKind::kInvalidArgument, head_of(group_, "register_buffer_hook"),
       hook ? "there is a buffer hook already; a model has one"
            : "the hook is an empty function; pass one that can be called");
}

// Parameters that no reducer knows would be trained by this rank alone. (Some that are not there
// any more do no harm. Tensor parallel modules of torch's hide theirs.)
void DdpCore::Impl::check_parameters(const char* where) {
  if (module_->holds(last_)) return;
  NamedTensors now = module_->parameters();
  const std::string changes = describe_changes(wrapped_, now, options_.ignore);
  if (!changes.empty()) {
    fail(ErrorKind::kInvalidArgument, "DistributedDataParallel, ", where, ", group \"",
         group_.name(), "\", rank ", group_.rank(), " of ", group_.size(),
         ": the parameters of the module have changed since it was wrapped (", changes,
         "), and would not be synchronised; wrap the module again, on all ranks, and make a new ",
         "optimizer for its parameters");
  }
  last_ = std::move(now);  // some of the same ones, or elsewhere
}

void DdpCore::Impl::sync_gradients() {
  check_parameters("sync_gradients");
  reducer_->sync_gradients();
  for (const auto& other : others_) other->sync_gradients();
}

void DdpCore::Impl::update_process_group(ProcessGroup group) {
  if (!others_.empty()) {
    fail(ErrorKind::kUnsupported, head_of(group_, "update_process_group"),
         "a model with parameter_groups cannot change its group: those groups would stay the old "
         "ones");
  }
  if (join()) {
    fail(ErrorKind::kInvalidArgument, head_of(group_, "update_process_group"),
         "it cannot be called inside of a Join; end the Join first");
  }
  check_parameters("update_process_group");
  if (copies_) copies_->restore();
  const int root = reducer_->update_process_group(std::move(group));
  group_ = reducer_->group();
  staging_.reset();
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : buffers()) tensors.push_back(buffer);
  if (!tensors.empty() && group_.size() > 1) broadcast_coalesced(group_, tensors, {.root = root});
}

void DdpCore::Impl::set_reduce(GradReduce reduce) {
  reducer_->set_reduce(reduce);
  for (const auto& other : others_) other->set_reduce(reduce);
}

void DdpCore::Impl::set_static_graph() {
  reducer_->set_static_graph();
  for (const auto& other : others_) other->set_static_graph();
  options_.static_graph = true;
}

void DdpCore::Impl::set_sample_rate(std::uint64_t rate) {
  reducer_->set_sample_rate(rate);
  for (const auto& other : others_) other->set_sample_rate(rate);
}

DdpStats DdpCore::Impl::stats() const {
  DdpStats data = reducer_->logging_data();
  data.module_name = module_->name();
  data.broadcast_buffers = options_.forward_sync_buffers;
  data.has_sync_bn = module_->has_sync_batch_norm();
  return data;
}

void DdpCore::Impl::restore_parameters() const {
  if (copies_) copies_->restore();
}

}  // namespace convoy
