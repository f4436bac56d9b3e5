#include "convoy/reducer.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/norm_group.h"
#include "ddp/reducer_impl.h"

namespace convoy {
namespace {

namespace ag = torch::autograd;

// Calls the reducer after a gradient was added to its parameter.
class ParameterHook final : public ag::FunctionPostHook {
 public:
  explicit ParameterHook(std::function<void(bool)> call) : call_(std::move(call)) {}

  ag::variable_list operator()(const ag::variable_list& outputs,
                               const ag::variable_list& inputs) override {
    call_(!inputs.empty() && inputs[0].defined());
    return outputs;
  }

 private:
  const std::function<void(bool)> call_;
};

}  // namespace

// --- hooks ---

// A parameter that is thawed, or whose data was replaced (as torch::load does), has an accumulator
// that is not ours yet.
void Reducer::Impl::hook_up() {
  bool changed = false;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].requires_grad()) continue;
    Parameter& parameter = parameters_[i];
    auto accumulator = ag::impl::grad_accumulator(tensors_[i]);
    if (accumulator == parameter.accumulator) continue;
    take_off(parameter);
    const auto call = [self = weak_from_this(), i](bool defined) {
      if (const auto alive = self.lock()) alive->on_gradient(i, defined);
    };
    parameter.hook = accumulator->add_post_hook(std::make_unique<ParameterHook>(call));
    parameter.accumulator = std::move(accumulator);
    changed = true;
  }
  if (!changed) return;
  accumulators_.clear();
  for (const Parameter& parameter : parameters_) {
    if (parameter.accumulator) accumulators_.push_back(parameter.accumulator);
  }
}

void Reducer::Impl::take_off(Parameter& parameter) {
  if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
  parameter.accumulator.reset();
}

void Reducer::Impl::take_hooks_off() {
  for (Parameter& parameter : parameters_) take_off(parameter);
  sinks_.clear();
}

// --- forward ---

void Reducer::Impl::check_process(const char* operation) const {
  if (home_.is_here()) return;
  fail(ErrorKind::kUnsupported, head_of(group_, operation),
       "this process is a forked child of the rank whose gradients these are, and its backward "
       "would change the rank's; run the model without gradients there (NoGradGuard, "
       "torch.no_grad()), or train in the rank itself");
}

void Reducer::Impl::before_forward() {
  if (!open_ || in_backward_) return;
  complete(Ending::kIncomplete,
           concat("the backward before left out ", names_of(missing()),
                  "; an output of its forward that could reach them was never back-propagated. ",
                  "Put it into the loss, drop it before backward, or set find_unused_parameters"));
}

std::vector<at::Tensor> Reducer::Impl::after_forward(at::TensorList outputs, Forward forward) {
  if (!at::GradMode::is_enabled()) return outputs.vec();
  check_process("forward");
  before_forward();
  hook_up();
  ++last_forward_;
  const bool in_step = forward == Forward::kInStep;
  const auto fate = std::make_shared<ForwardFate>();
  fate->paused = in_step && is_paused();
  if (in_step && !fate->paused) forwards_.emplace(last_forward_, fate);
  std::vector<at::Tensor> result = outputs.vec();
  const bool some = std::any_of(result.begin(), result.end(), [](const at::Tensor& output) {
    return output.defined() && output.requires_grad();
  });
  std::erase_if(sinks_, [](const auto& sink) { return sink.expired(); });
  for (at::Tensor& output : result) {
    if (!output.defined()) continue;
    // A rank that used no parameter must still be able to take part in the others' round.
    const bool wanted = some || forward == Forward::kAside
                            ? output.requires_grad()
                            : ag::isDifferentiableType(output.scalar_type());
    if (wanted) output = put_sink(output, make_sink(last_forward_, fate));
  }
  return result;
}

c10::intrusive_ptr<Sink> Reducer::Impl::make_sink(std::uint64_t forward,
                                                  std::shared_ptr<ForwardFate> fate) {
  auto sink =
      c10::make_intrusive<Sink>(forward, std::move(fate), [self = weak_from_this()](Sink& visited) {
        const auto alive = self.lock();
        return alive && alive->enter(&visited);
      });
  sinks_.emplace_back(sink);
  return sink;
}

std::vector<NodePtr> Reducer::Impl::waiting_sinks(const std::set<std::uint64_t>* of_forwards) {
  std::vector<NodePtr> waiting;
  for (const auto& weak : sinks_) {
    auto sink = weak.lock();
    if (!sink || sink->visited) continue;
    if (of_forwards == nullptr || of_forwards->contains(sink->forward)) {
      waiting.emplace_back(std::move(sink));
    }
  }
  return waiting;
}

bool Reducer::Impl::comes_by_a_sink() {
  const auto waiting = waiting_sinks();
  return std::any_of(waiting.begin(), waiting.end(),
                     [](const NodePtr& sink) { return is_in_backward(*sink); });
}

// --- backward ---

bool Reducer::Impl::enter(Sink* sink) {
  if (!backward_accumulates(accumulators_)) {
    // autograd::grad. With a history, what it gives may be part of a loss, whose backward goes
    // around the sink.
    armed_ |= at::GradMode::is_enabled();
    return false;
  }
  check_process("backward");
  if (!in_backward_) {
    const auto self = shared_from_this();
    at_end_of_backward([self] { self->end(); },
                       [self](const std::string& cause) { self->failed(cause); });
    in_backward_ = true;
    enter_births();
    if (begins_) begins_();
    syncing_ = paused_ == 0;
    set_sums_aside();
    if (syncing_) {
      entered_ = last_gradient_ = Clock::now();
      round_ = "backward";
      if (!open_) open(sink);
    }
  }
  if (sink != nullptr) {
    if (syncing_) {
      visited_.insert(sink->forward);
      if (sink->fate && sink->fate->paused) forwards_.try_emplace(sink->forward, nullptr);
    } else {
      forwards_.erase(sink->forward);
    }
  }
  return true;
}

// True if reducing a gradient that is reduced already changes it. A mean of equal values, weighted
// or not, is that value; but ranks without inputs, in a Join, do not have it. (Where an optimizer
// takes gradients from the buckets, these must be all of it.)
bool Reducer::Impl::sums_once() const {
  if (size_ == 1) return false;
  if (options_.reduce.kind() == GradReduce::Kind::kSum) return true;
  return join_ && consumers_.empty() && ports_.empty();
}

// Before a backward adds to gradients that are reduced: these must not be reduced again. Whoever
// zeroes or drops a gradient means all of it, also what was set aside.
void Reducer::Impl::set_sums_aside() {
  const bool wanted = sums_once();
  const at::NoGradGuard no_grad;
  if (norm_weight_->used && std::none_of(tensors_.begin(), tensors_.end(), [](const auto& tensor) {
        return tensor.grad().defined() && !is_zero(tensor.grad());
      })) {
    norm_weight_->forget();
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    at::Tensor& gradient = tensors_[i].mutable_grad();
    const auto is_gone = [&] { return !gradient.defined() || is_zero(gradient); };
    if (parameter.summed.defined() && !parameter.is_untouched(gradient) && is_gone()) {
      parameter.summed.reset();
    }
    parameter.mixed = parameter.mixed && !is_gone();
    if (!wanted || parameter.mixed || !parameter.reduced) continue;
    parameter.reduced = false;
    if (!parameter.is_seen(gradient)) continue;  // the user's own
    parameter.summed = gradient.detach().clone();
    if (gradient.requires_grad()) {  // may be part of a loss
      gradient = at::zeros_like(parameter.summed);
    } else {
      gradient.zero_();
    }
    parameter.note(gradient);
  }
}

// After an addition of which we did not know before. One change since is nothing but this addition.
void Reducer::Impl::look_for_mixing(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const at::Tensor& gradient = tensors_[index].grad();
  if (in_backward_ || !gradient.defined()) return;
  const bool changed_once =
      parameter.is_seen(gradient) && gradient._version() == parameter.seen_version + 1;
  if (parameter.reduced && sums_once()) parameter.mixed |= changed_once;
  if (!parameter.summed.defined() || changed_once || at::GradMode::is_enabled()) return;
  if (parameter.is_seen(gradient)) {
    parameter.mixed = true;  // zeroed before, or scaled: that is not to be seen any more
  } else {
    parameter.summed.reset();  // dropped before
  }
}

void Reducer::Impl::on_gradient(std::size_t index, bool defined) {
  Parameter& parameter = parameters_[index];
  if (defined) look_for_mixing(index);
  // A parameter that the loss uses directly may come before the outputs do.
  if (!in_backward_ && (armed_ || comes_by_a_sink())) enter(nullptr);
  if (defined) {
    parameter.used = parameter.computed = true;
    parameter.reduced = false;
    if (parameter.summed.defined()) parameter.note(tensors_[index].grad());
  }
  if (!in_backward_ || !syncing_) return;
  ++parameter.fired;
  parameter.arrival = ++arrivals_;
  last_gradient_ = Clock::now();
  if (alone_ || parameter.sparse || !parameter.active || outcome_ != Ending::kGood) return;
  if (order_.empty()) {
    parameter.hidden |= std::exchange(parameter.presumed_unused, false);
    return;
  }
  if (parameter.bucket == kNone) return;  // thawed since the buckets were made
  Bucket& bucket = buckets_[parameter.bucket];
  if (parameter.presumed_unused && options_.static_graph) {
    return trouble(Ending::kMistaken,
                   concat("the graph is said to be static, but ", parameter.name,
                          " is used now and was not in the first backward; leave static_graph out, "
                          "or set find_unused_parameters instead"));
  }
  if (bucket.launched || bucket.skipped) {
    parameter.hidden |= parameter.presumed_unused;
    return trouble(
        Ending::kMistaken,
        concat(parameter.name, " got another gradient after its bucket was reduced: ",
               parameter.presumed_unused
                   ? "no output of forward had reached it. It is used behind a nested backward "
                     "(checkpointing), or outside of forward"
                   : "a nested backward (checkpointing) or a second thread uses it again",
               ". If this is the same in each step, the next ones will wait for it; ",
               "static_graph waits for it from the start"));
  }
  if (parameter.presumed_unused) {
    parameter.presumed_unused = false;
    parameter.hidden = true;
    ++bucket.pending;
  }
  if (parameter.fired < parameter.expected) return;
  const bool first = !parameter.ready;
  make_ready(index);
  if (first && --bucket.pending == 0) timeline_.ready(parameter.bucket);
  launch_complete_ones();
}

std::vector<std::size_t> Reducer::Impl::missing() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (parameter.active && !parameter.used && parameter.fired == 0 && !parameter.learnt_unused) {
      indices.push_back(i);
    }
  }
  return indices;
}

std::string Reducer::Impl::names_of(const std::vector<std::size_t>& indices) const {
  constexpr std::size_t kMost = 8;
  std::string names;
  for (std::size_t k = 0; k < std::min(kMost, indices.size()); ++k) {
    names += concat(k == 0 ? "" : ", ", parameters_[indices[k]].name, " (", indices[k], ")");
  }
  if (indices.size() > kMost) names += concat(" and ", indices.size() - kMost, " more");
  return names;
}

std::string Reducer::Impl::missing_text(const std::vector<std::size_t>& indices) const {
  if (options_.static_graph) {
    return concat("the graph is said to be static, but got no gradient for ", names_of(indices),
                  ", which the first backward used");
  }
  return concat("no gradient came for ", names_of(indices), ": the loss does not depend on ",
                indices.size() == 1 ? "it" : "them",
                ". If that is meant, set find_unused_parameters (or static_graph, if it is the "
                "same in every step); if the model has other parameters by now, make the reducer "
                "again, of those");
}

void Reducer::Impl::leave() {
  in_backward_ = false;
  if (births_) births_->leave();
  if (!ends_) return;
  ends_(syncing_ && !alone_ ? BackwardEnd::kReduces : BackwardEnd::kAdds);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // it may have cast gradients
    const at::Tensor& gradient = tensors_[i].grad();
    if (parameters_[i].summed.defined() && gradient.defined()) parameters_[i].note(gradient);
  }
}

void Reducer::Impl::end() {
  leave();
  if (!syncing_) return;
  const bool may_be_unused = options_.static_graph ? !learnt_ : options_.find_unused_parameters;
  const auto left_out = may_be_unused ? std::vector<std::size_t>{} : missing();
  if (left_out.empty()) return complete(Ending::kGood, {});
  if (!options_.static_graph && outcome_ == Ending::kGood) {
    // Another output of the same forward may still bring them.
    const auto reached = reachable(waiting_sinks(&visited_));
    const bool coming = std::all_of(left_out.begin(), left_out.end(), [&](std::size_t i) {
      return reached.contains(parameters_[i].accumulator.get());
    });
    if (coming) return;
  }
  complete(Ending::kIncomplete, missing_text(left_out));
}

void Reducer::Impl::failed(const std::string& cause) {
  try {
    leave();
    if (!syncing_ || !open_) return;
    const std::string line = cause.substr(0, cause.find('\n'));
    if (!alone_) {
      log_error("backward ", stats_.backwards + 1, " failed on rank ", group_.rank(), " of ", size_,
                " (", line, "); telling the others");
    }
    abandon_norms(group_);  // others may wait in one for this rank
    complete(Ending::kFailed, line);
  } catch (...) {  // the caller of backward gets the cause itself
  }
}

// --- the public class ---

Reducer::Reducer(std::vector<at::Tensor> parameters, ProcessGroup group, ReducerOptions options)
    : impl_(std::make_shared<Impl>(std::move(parameters), std::move(group), std::move(options))) {
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
    if (!group) fail(ErrorKind::kInvalidArgument, "the new group is none; pass one");
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

Reducer::NoSync::NoSync(Reducer& reducer) : impl_(reducer.impl_) { impl_->pause(1); }
Reducer::NoSync::~NoSync() { impl_->pause(-1); }

}  // namespace convoy
