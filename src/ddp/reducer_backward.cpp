// Reducer: forwards, and backwards until their end. A gradient's way begins here, in enter and
// on_gradient.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/error.h"
#include "convoy/allocator.h"
#include "ddp/agreement.h"
#include "ddp/norm_group.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {
namespace {

namespace ag = torch::autograd;

// Calls the reducer after a gradient was added to its parameter.
class ParameterHook final : public ReducerHook {
 public:
  ParameterHook(std::weak_ptr<Reducer::Impl> reducer,
                std::function<void(Reducer::Impl&, bool)> call)
      : reducer_(std::move(reducer)), call_(std::move(call)) {}

  ag::variable_list operator()(const ag::variable_list& outputs,
                               const ag::variable_list& inputs) override {
    if (const auto alive = reducer()) call_(*alive, !inputs.empty() && inputs[0].defined());
    return outputs;
  }
  std::shared_ptr<Reducer::Impl> reducer() const override { return reducer_.lock(); }

 private:
  const std::weak_ptr<Reducer::Impl> reducer_;
  const std::function<void(Reducer::Impl&, bool)> call_;
};

}  // namespace

// --- hooks ---

// A parameter that is thawed, or whose data was replaced (as torch::load does), has an accumulator
// that is not ours yet.
void Reducer::Impl::hook_up() {
  bool changed = false;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].requires_grad()) continue;
    ParameterState& parameter = parameters_[i];
    auto accumulator = ag::impl::grad_accumulator(tensors_[i]);
    if (accumulator == parameter.accumulator) continue;
    take_off(parameter);
    const auto call = [i](Impl& self, bool defined) { self.on_gradient(i, defined); };
    parameter.hook =
        accumulator->add_post_hook(std::make_unique<ParameterHook>(weak_from_this(), call));
    parameter.accumulator = std::move(accumulator);
    changed = true;
  }
  if (!changed) return;
  accumulators_.clear();
  for (const ParameterState& parameter : parameters_) {
    if (parameter.accumulator) accumulators_.push_back(parameter.accumulator);
  }
}

void Reducer::Impl::take_off(ParameterState& parameter) {
  if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
  parameter.accumulator.reset();
}

void Reducer::Impl::take_hooks_off() {
  for (ParameterState& parameter : parameters_) take_off(parameter);
  forwards_.drop_sinks();
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
  if (!round_.open || in_backward_) return;
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
  const auto fate = forwards_.begin(forward == Forward::kInStep, is_paused());
  std::vector<at::Tensor> result = outputs.vec();
  const bool some = std::any_of(result.begin(), result.end(), [](const at::Tensor& output) {
    return output.defined() && output.requires_grad();
  });
  for (at::Tensor& output : result) {
    if (!output.defined()) continue;
    // A rank that used no parameter must still be able to take part in the others' round.
    const bool wanted = some || forward == Forward::kAside
                            ? output.requires_grad()
                            : ag::isDifferentiableType(output.scalar_type());
    if (wanted) output = put_sink(output, make_sink(forwards_.last(), fate));
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
  forwards_.add(sink);
  return sink;
}

// --- backward ---

bool Reducer::Impl::enter(Sink* sink) {
  GradientHome* const pass = GradientHome::current();
  if (!pass && !backward_accumulates(accumulators_)) {
    // autograd::grad. With a history, what it gives may be part of a loss, whose backward goes
    // around the sink.
    forwards_.armed |= at::GradMode::is_enabled();
    return false;
  }
  check_process("backward");
  if (!in_backward_) {
    if (pass) pass->lend(shared_from_this());
    loan_.pass = pass;
    const auto self = shared_from_this();
    at_end_of_backward([self] { self->end(); },
                       [self](const std::string& cause) { self->failed(cause); });
    in_backward_ = true;
    enter_births();
    if (users_.begins) users_.begins();
    syncing_ = paused_ == 0;
    set_sums_aside();
    if (syncing_) {
      round_.enter("backward");
      if (!round_.open) open(sink);
    }
  }
  if (sink != nullptr) {
    if (syncing_) round_.visited.insert(sink->forward);
    forwards_.visit(*sink, syncing_);
  }
  return true;
}

// With the step allocator, gradients are made where the other ranks see them.
void Reducer::Impl::enter_births() {
  if (!births_) {
    if (size_ == 1 || !is_allocator_installed() || !travels_in_pieces()) return;
    std::vector<std::size_t> sizes;
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.nbytes() >= kLeastPiece) sizes.push_back(tensor.nbytes());
    }
    births_ = std::make_unique<SharedBirths>(std::move(sizes));
  }
  births_->enter();
}

void Reducer::Impl::open(const Sink* sink) {
  round_.begin(users_.hook && compares_ && size_ > 1);
  join_.open_round();
  observer_.open(round_.entered);
  set_sums_aside();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].round.open(parameters_[i].open(tensors_[i].grad()));
  }
  look_at_parameters();
  for (Bucket& bucket : layout_.buckets) {
    bucket.pending = bucket.parameters.size();
    bucket.launched = false;
    bucket.skipped = false;
    bucket.result.reset();
  }
  if (alone_) return;
  // Two models in one backward: which one's buckets are complete first may differ between ranks.
  const bool defers = join_.defers();
  round_.launches_late = launches_late_ || defers || has_other_reducers(group_, norm_weight_);
  presume_unused(sink);
  if (!defers) {
    announce();
    const std::string title = head();
    try {
      begin();
    } catch (const coll::Disagreement&) {
      close(Ending::kFailed);  // others do something else: there is no round
      rethrow_with(title);
    } catch (...) {
      rethrow_with(title);
    }
  }
  for (ParameterState& parameter : parameters_) {
    if (!std::exchange(parameter.mixed, false)) continue;
    trouble(Ending::kMistaken,
            concat("the gradient of ", parameter.name,
                   " was a sum over ranks already when a backward outside of this reducer, or ",
                   "directly on the parameter, added to it: zero the gradients before"));
  }
}

void Reducer::Impl::presume_unused(const Sink* sink) {
  if (options_.static_graph) {
    // What no_sync() or the user has made of a gradient is reduced, whatever the graph is.
    for (ParameterState& parameter : parameters_) {
      parameter.round.presumed_unused = in_backward_ && parameter.learnt_unused && !parameter.used;
    }
  } else if (options_.find_unused_parameters && sink != nullptr && !sink->visited) {
    const auto start = Clock::now();
    const auto reached = reachable(forwards_.waiting());
    for (ParameterState& parameter : parameters_) {
      parameter.round.presumed_unused = parameter.active && !parameter.hidden && !parameter.used &&
                                        !reached.contains(parameter.accumulator.get());
    }
    observer_.stats().search_time = Clock::now() - start;
  }
  for (const ParameterState& parameter : parameters_) {
    const bool waited_for = parameter.active && !parameter.round.presumed_unused;
    if (parameter.bucket != ParameterPlace::kNone && !waited_for)
      --layout_.buckets[parameter.bucket].pending;
  }
}

// True if reducing a gradient that is reduced already changes it. A mean of equal values, weighted
// or not, is that value; but ranks without inputs, in a Join, do not have it. (Where an optimizer
// takes gradients from the buckets, these must be all of it.)
bool Reducer::Impl::sums_once() const {
  if (size_ == 1) return false;
  if (options_.reduce.kind() == GradReduce::Kind::kSum) return true;
  return join_.is_active() && users_.consumers.empty() && users_.ports.empty();
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
    parameters_[i].set_aside(tensors_[i].mutable_grad(), wanted);
  }
}

void Reducer::Impl::on_gradient(std::size_t index, bool defined) {
  ParameterState& parameter = parameters_[index];
  if (defined && !in_backward_) {
    parameter.look_for_mixing(tensors_[index].grad(), sums_once());
  }
  // A parameter that the loss uses directly may come before the outputs do.
  if (!in_backward_ && (forwards_.armed || forwards_.comes_by_one())) enter(nullptr);
  if (defined) parameter.added(tensors_[index].grad());
  if (!in_backward_ || !syncing_) return;
  ++parameter.round.fired;
  parameter.round.arrival = ++round_.arrivals;
  round_.last_gradient = Clock::now();
  if (alone_ || parameter.sparse || !parameter.active || round_.outcome != Ending::kGood) return;
  if (layout_.order.empty()) {
    parameter.hidden |= std::exchange(parameter.round.presumed_unused, false);
    return;
  }
  if (parameter.bucket == ParameterPlace::kNone) return;  // thawed since the buckets were made
  Bucket& bucket = layout_.buckets[parameter.bucket];
  if (parameter.round.presumed_unused && options_.static_graph) {
    return trouble(Ending::kMistaken,
                   concat("the graph is said to be static, but ", parameter.name,
                          " is used now and was not in the first backward; leave static_graph out, "
                          "or set find_unused_parameters instead"));
  }
  if (bucket.launched || bucket.skipped) {
    parameter.hidden |= parameter.round.presumed_unused;
    return trouble(
        Ending::kMistaken,
        concat(parameter.name, " got another gradient after its bucket was reduced: ",
               parameter.round.presumed_unused
                   ? "no output of forward had reached it. It is used behind a nested backward "
                     "(checkpointing), or outside of forward"
                   : "a nested backward (checkpointing) or a second thread uses it again",
               ". If this is the same in each step, the next ones will wait for it; ",
               "static_graph waits for it from the start"));
  }
  if (parameter.round.presumed_unused) {
    parameter.round.presumed_unused = false;
    parameter.hidden = true;
    ++bucket.pending;
  }
  if (parameter.round.fired < parameter.expected) return;
  const bool first = !parameter.round.ready;
  make_ready(index);
  if (first && --bucket.pending == 0) observer_.timeline().ready(parameter.bucket);
  launch_complete_ones();
}

}  // namespace convoy
