// Reducer: one reduction of all gradients.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "convoy/hooks.h"
#include "ddp/norm_group.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {

std::string Reducer::Impl::head() const {
  return concat("backward ", stats_.backwards + 1, ", group \"", group_.name(), "\", rank ",
                group_.rank(), " of ", size_, ": ");
}

std::string Reducer::Impl::where(std::size_t bucket) const {
  const auto& list = buckets_[bucket].parameters;
  return concat("bucket ", bucket, " of ", buckets_.size(), " (", parameters_[list.front()].name,
                list.size() > 1 ? concat(" to ", parameters_[list.back()].name) : "", ")");
}

void Reducer::Impl::trouble(Outcome outcome, std::string text) {
  if (outcome > outcome_) {
    outcome_ = outcome;
    text_ = std::move(text);
  }
  if (outcome >= Outcome::kDisturbed) end_hook_group();
}

// Others may wait inside of a hook for operations that will not come. (Where the hook has no group
// of its own, that ends the group: better than to wait.)
void Reducer::Impl::end_hook_group() {
  if (!hook_ || !hook_group_ || size_ == 1) return;
  hook_group_.abort();
  if (hook_group_ != group_) hook_group_ = {};
}

// --- its beginning ---

void Reducer::Impl::open(const Sink* sink) {
  open_ = true;
  begun_ = false;
  announced_ = false;
  next_ = 0;
  arrivals_ = 0;
  outcome_ = Outcome::kGood;
  text_.clear();
  stats_.copy_time = stats_.search_time = {};
  timeline_.open(entered_);
  set_sums_aside();
  look_at_parameters();
  for (Parameter& parameter : parameters_) {
    parameter.fired = 0;
    parameter.arrival = 0;
    parameter.ready = false;
    parameter.presumed_unused = false;
    parameter.kept.reset();
    parameter.graph.reset();
  }
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.launched = false;
    bucket.skipped = false;
    bucket.result.reset();
  }
  if (alone_) return;
  // Two models in one backward: which one's buckets are complete first may differ between ranks.
  const bool defers = join_ && join_->defers();
  late_now_ = launches_late_ || defers || has_other_reducers(group_, enlisted_);
  presume_unused(sink);
  if (!defers) {
    announce();
    try {
      begin();
    } catch (...) {
      rethrow_with(head());
    }
  }
  if (!mixed_.empty()) {
    trouble(Outcome::kFailed,
            concat("the gradient of ", std::exchange(mixed_, {}),
                   " was a sum over ranks already when a backward outside of this reducer, or ",
                   "directly on the parameter, added to it: zero the gradients before"));
  }
}

void Reducer::Impl::presume_unused(const Sink* sink) {
  if (options_.static_graph) {
    for (Parameter& parameter : parameters_) parameter.presumed_unused = parameter.learnt_unused;
  } else if (options_.find_unused_parameters && sink != nullptr && !sink->visited) {
    const auto start = Clock::now();
    const auto reached = reachable(waiting_sinks());
    for (Parameter& parameter : parameters_) {
      parameter.presumed_unused = parameter.active && !parameter.hidden && !parameter.used &&
                                  !reached.contains(parameter.accumulator.get());
    }
    stats_.search_time = Clock::now() - start;
  }
  for (const Parameter& parameter : parameters_) {
    const bool waited_for = parameter.active && !parameter.presumed_unused;
    if (parameter.bucket != kNone && !waited_for) --buckets_[parameter.bucket].pending;
  }
}

void Reducer::Impl::begin() {
  begun_ = true;
  if (hook_ && !hook_group_) hook_group_ = own_group(group_);
  if (options_.reduce.kind() == GradReduce::Kind::kWeighted) {
    const double samples = shadowing_ ? 0 : options_.reduce.samples();
    const at::Tensor sum = at::full({1}, samples, at::kDouble);
    group_.all_reduce(sum);
    const double total = sum.item<double>();
    weight_ = total > 0 ? samples / total : 0;
  }
  if (options_.skip_all_reduce_unused_params && !order_.empty()) {
    const at::Tensor map = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kByte);
    auto* const used = map.mutable_data_ptr<std::uint8_t>();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = parameters_[i];
      const bool unused = shadowing_ ? !parameter.used : parameter.presumed_unused;
      used[i] = unused || !parameter.active ? 0 : 1;
    }
    group_.all_reduce(map, {.op = ReduceOp::kMax});
    for (Bucket& bucket : buckets_) {
      bucket.skipped = std::none_of(bucket.parameters.begin(), bucket.parameters.end(),
                                    [&](std::size_t i) { return used[i] != 0; });
    }
  }
  check_replicas();
}

// --- gradients into buckets ---

void Reducer::Impl::make_ready(std::size_t index) {
  Parameter& parameter = parameters_[index];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  const at::Tensor& slot = buckets_[parameter.bucket].slots[parameter.slot];
  parameter.ready = true;
  if (!gradient.defined()) {
    const at::NoGradGuard no_grad;
    slot.zero_();
    return;
  }
  const bool fits = gradient.scalar_type() == slot.scalar_type() || options_.reduce_dtype;
  if (gradient.layout() != c10::kStrided || !fits || !gradient.sizes().equals(slot.sizes())) {
    return trouble(Outcome::kFailed,
                   concat("the gradient of ", parameter.name, " is ",
                          gradient.layout() != c10::kStrided
                              ? std::string("sparse, which was not announced: list it as sparse")
                              : concat(gradient.scalar_type(), " of sizes ", gradient.sizes(),
                                       ", not ", slot.scalar_type(), " of sizes ", slot.sizes())));
  }
  if (is_alias(gradient, slot)) return;
  parameter.stays = can_stay(index);
  if (!parameter.stays) copy_in(index);
}

void Reducer::Impl::copy_in(std::size_t index) {
  Parameter& parameter = parameters_[index];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  const at::Tensor& slot = buckets_[parameter.bucket].slots[parameter.slot];
  const auto start = Clock::now();
  const bool has_history = gradient.requires_grad();
  {
    const at::NoGradGuard no_grad;
    slot.copy_(gradient);
  }
  if (has_history) {
    parameter.graph = gradient;
  } else if (options_.gradient_as_bucket_view && slot.scalar_type() == parameter.type) {
    gradient = bucket_of(parameter).handle(parameter.slot);  // frees the copied one
  }
  stats_.copy_time += Clock::now() - start;
}

// For a parameter whose hook did not run, at the end or when its bucket goes.
void Reducer::Impl::settle(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const at::Tensor& gradient = tensors_[index].grad();
  const at::NoGradGuard no_grad;
  if (!parameter.active) {  // frozen since the buckets were made
    buckets_[parameter.bucket].slots[parameter.slot].zero_();
    parameter.ready = true;
    return;
  }
  if (shadowing_ && !parameter.used) return add_nothing(index);
  if (!parameter.used && gradient.defined()) {
    parameter.kept = gradient.detach().clone();
  }
  make_ready(index);
}

void Reducer::Impl::launch_complete_ones() {
  if (late_now_) return;
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) launch(next_++);
}

void Reducer::Impl::launch(std::size_t index) {
  Bucket& bucket = buckets_[index];
  bucket.launched = true;
  if (bucket.skipped) return;
  // Whatever happens here, the others count on this bucket.
  guarded(index, [&] {
    for (const std::size_t i : bucket.parameters) {
      if (!parameters_[i].ready) settle(i);
    }
  });
  if (options_.nonfinite != NonFinite::kIgnore) check_finite(index);
  timeline_.launched(index);
  bucket.deferred = defers(bucket);
  if (!bucket.deferred) guarded(index, [&] { move_shared_ones(bucket); });
  if (bucket.deferred) {
    ShardPort& port = *port_of(bucket);
    if (!port.overlaps()) return;
    std::vector<bool> used;
    for (const std::size_t i : bucket.parameters) used.push_back(parameters_[i].used);
    return guarded(index, [&] { port.launched(index, outcome_ == Outcome::kGood, used); });
  }
  if (outcome_ >= Outcome::kDisturbed && hook_) return;  // the hook's group is no more
  guarded(index, [&] { bucket.result = start(index); });
}

template <class Function>
void Reducer::Impl::guarded(std::size_t bucket, Function function) {
  try {
    function();
  } catch (const Error& e) {
    trouble(Outcome::kDisturbed, concat(where(bucket), ": ", e.what()));
  } catch (const std::exception& e) {
    trouble(Outcome::kFailed, concat(where(bucket), ": ", e.what()));
  } catch (...) {
    trouble(Outcome::kFailed, concat(where(bucket), ": something was thrown"));
  }
}

HookResult Reducer::Impl::start(std::size_t index) {
  Bucket& bucket = buckets_[index];
  if (!hook_) {
    HookResult result =
        travels_in_pieces()
            ? reduce_pieces(group_, pieces_of(bucket), bucket.buffer, options_.reduce)
            : reduce_bucket(group_, bucket.buffer, options_.reduce, weight_);
    const double scale = join_scale();
    if (scale == 1) return result;
    return std::move(result).then([scale](const at::Tensor& mean) { return mean.mul_(scale); });
  }
  try {
    return hook_(BucketAccess::make(buckets_, index, tensors_, hook_group_, stats_.backwards + 1));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw std::runtime_error(concat("the comm hook threw: ", e.what()));
  }
}

// --- its end ---

void Reducer::Impl::complete(Outcome outcome, std::string text) {
  RECORD_FUNCTION("convoy::finish_backward", std::vector<c10::IValue>());
  const at::NoGradGuard no_grad;
  const auto kind_of = [](Outcome worst) {
    return worst < Outcome::kDisturbed ? ErrorKind::kInvalidArgument : ErrorKind::kRemote;
  };
  const std::string title = head();
  if (alone_) {
    std::vector<bool> used;
    for (const Parameter& parameter : parameters_) used.push_back(parameter.used);
    verdict_.set_used(std::move(used));
    if (outcome == Outcome::kGood) {
      check_finite_alone();
      outcome = outcome_;
      text = text_;
    }
    close(outcome);
    if (outcome == Outcome::kGood) return;
    error_ = title + text;
    if (outcome == Outcome::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
      return skip_round(error_);
    }
    fail(kind_of(outcome), error_);
  }
  if (!begun_) announce();
  std::string reason;
  bool fine = false;
  try {
    if (!begun_) begin();
    if (outcome > outcome_) trouble(outcome, std::move(text));
    if (order_.empty()) agree_on_order();
    fine = finish_buckets();
    if (fine && changed_) {
      add_buckets();
      fine = finish_buckets();
    }
    if (fine) {
      reduce_sparse();
      consume();
      write_back();
      if (changed_) lay_out();
      close(Outcome::kGood);
    } else {
      reason = verdict_.explain(group_, text_);
    }
  } catch (...) {
    give_up(group_);
    close(Outcome::kFailed);
    try {
      rethrow_with(text_.empty() ? title : concat(title, text_, "; then "));
    } catch (const Error& e) {
      error_ = e.what();
      throw;
    }
  }
  if (fine) {
    if (join_) join_->finish(join_step_);
    return;
  }
  const Outcome worst = verdict_.worst();
  if (worst >= Outcome::kDisturbed) {
    end_hook_group();
    abandon_norms(group_);
  }
  close(worst == Outcome::kGood ? Outcome::kFailed : worst);
  error_ = title + reason;
  if (worst == Outcome::kNotFinite && options_.nonfinite == NonFinite::kSkip) {
    return skip_round(error_);
  }
  fail(kind_of(worst), error_);
}

// What is left of the buckets, and the verdict about them.
bool Reducer::Impl::finish_buckets() {
  while (next_ < buckets_.size()) launch(next_++);
  take_results();
  check_sparse();
  const auto forwards = shadowing_ ? Verdict::kAnyForwards : forwards_.size();
  Verdict::Ballot ballot{outcome_, stats_.backwards + 1, forwards, layout_hash(), {}};
  for (const Parameter& parameter : parameters_) ballot.used.push_back(parameter.used);
  if (!shadowing_) ballot.stamps = timeline_.stamps(last_gradient_);
  return verdict_.reach(group_, ballot);
}

void Reducer::Impl::take_results() {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    if (!bucket.result) continue;
    at::Tensor result;
    try {
      result = bucket.result->wait();
    } catch (const Error& e) {
      // A lost or late rank ends the group: there is nobody to reach a verdict with.
      if (!hook_ && e.kind() != ErrorKind::kInvalidArgument) {
        throw Error(e.kind(), concat("bucket ", index, " of ", buckets_.size(), ": ", e.what()));
      }
      trouble(Outcome::kDisturbed, concat(where(index), ": ", e.what()));
      continue;
    } catch (const std::exception& e) {
      if (!hook_) throw;
      trouble(Outcome::kFailed, concat(where(index), ": the comm hook threw: ", e.what()));
      continue;
    } catch (...) {
      trouble(Outcome::kFailed, concat(where(index), ": the comm hook threw something"));
      continue;
    }
    bucket.result.reset();
    timeline_.done(index);
    if (result.defined() && result.is_same(bucket.buffer)) continue;
    if (!result.defined()) {
      trouble(Outcome::kFailed, concat(where(index), ": the comm hook returned no tensor"));
      continue;
    }
    if (result.layout() != c10::kStrided || result.numel() != bucket.buffer.numel() ||
        result.scalar_type() != bucket.buffer.scalar_type()) {
      trouble(Outcome::kFailed, concat(where(index), ": the comm hook returned ", result.numel(),
                                       " elements of ", result.scalar_type(), ", not ",
                                       bucket.buffer.numel(), " of ", bucket.buffer.scalar_type()));
      continue;
    }
    bucket.buffer.copy_(result.reshape({-1}));
  }
  // Last: what it throws may be no end of the group, and nothing of this round is under way then.
  for (const auto& port : ports_) port->drain();
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    if (buckets_[index].deferred) timeline_.done(index);
  }
}

void Reducer::Impl::write_back() {
  const auto start = Clock::now();
  for (const Bucket& bucket : buckets_) {
    if (bucket.skipped) continue;
    for (const std::size_t i : bucket.parameters) {
      if (parameters_[i].active) write_back(i);
    }
  }
  stats_.copy_time += Clock::now() - start;
}

void Reducer::Impl::write_back(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const at::Tensor& slot = buckets_[parameter.bucket].slots[parameter.slot];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  if (!verdict_.used()[index]) {
    // Nobody's: as it was, to the bit.
    if (parameter.kept.defined()) gradient.copy_(parameter.kept);
    return;
  }
  if (parameter.stays) return;
  if (parameter.dropped) {
    gradient.reset();
  } else if (parameter.graph.defined()) {
    // The value is the mean, the history this rank's: a loss made of it has this rank's part of the
    // gradient, which is reduced in turn.
    constexpr std::uint64_t kNoForward = 0;
    gradient = put_sink(slot.clone(), parameter.graph, make_sink(kNoForward));
  } else if (options_.gradient_as_bucket_view && slot.scalar_type() == parameter.type) {
    if (!is_alias(gradient, slot)) gradient = bucket_of(parameter).handle(parameter.slot);
  } else if (gradient.defined() && gradient.scalar_type() == parameter.type) {
    gradient.copy_(slot);
  } else {
    gradient =
        at::empty_strided(slot.sizes(), slot.strides(), slot.options().dtype(parameter.type));
    gradient.copy_(slot);
  }
}

void Reducer::Impl::close(Outcome outcome) {
  open_ = false;
  const auto now = Clock::now();
  const bool good = outcome == Outcome::kGood;
  const at::NoGradGuard no_grad;
  skipped_ = false;
  if (good) error_.clear();
  observe(outcome, now);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.expected = std::max(parameter.expected, parameter.fired);
    if (good && options_.static_graph && !learnt_ && !shadowing_) {
      parameter.learnt_unused = parameter.active && !parameter.used && parameter.fired == 0;
    }
    const at::Tensor& gradient = tensors_[i].grad();
    if (parameter.summed.defined()) {
      tensors_[i].mutable_grad() =
          gradient.defined() ? gradient.add_(parameter.summed) : std::move(parameter.summed);
      parameter.summed.reset();
    }
    const bool left_local = std::exchange(parameter.left_local, false);
    const bool deferred =
        left_local || (parameter.bucket != kNone && bucket_of(parameter).deferred);
    if (good && verdict_.used()[i] && tensors_[i].grad().defined() && !deferred) {
      parameter.reduced = true;
      parameter.reduced_tensor = tensors_[i].grad().unsafeGetTensorImpl();
      parameter.reduced_version = tensors_[i].grad()._version();
    } else if (!good) {
      parameter.reduced = false;
    }
    parameter.used = left_local;
    parameter.fired = 0;
    parameter.kept.reset();
    parameter.graph.reset();
    parameter.rows.reset();
    parameter.stays = false;
  }
  for (Bucket& bucket : buckets_) bucket.result.reset();
  for (const auto& port : ports_) port->closed();
  learnt_ |= good && !shadowing_;
  armed_ = false;
  forwards_.clear();
  visited_.clear();
  // The next round knows better; but a sharded optimizer has not had these yet.
  if (std::exchange(guessed_, false) && ports_.empty()) {
    order_.clear();
    buckets_.clear();
    for (Parameter& parameter : parameters_) parameter.bucket = kNone;
  }
  ++stats_.backwards;
  stats_.backward_time = now - entered_;
  stats_.exposed_time = now - last_gradient_;
}

void Reducer::Impl::sync_gradients() {
  if (in_backward_) {
    fail(ErrorKind::kInvalidArgument, "sync_gradients() inside of a backward");
  }
  entered_ = last_gradient_ = Clock::now();
  if (!open_) {
    try {
      open(nullptr);
    } catch (...) {
      if (open_) close(Outcome::kFailed);
      throw;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // also what the user has set
    Parameter& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    const bool as_we_left_it = parameter.reduced && gradient.defined() &&
                               gradient.unsafeGetTensorImpl() == parameter.reduced_tensor &&
                               gradient._version() == parameter.reduced_version;
    parameter.used |= parameter.active && gradient.defined() && !as_we_left_it;
  }
  complete(Outcome::kGood, {});
}

}  // namespace convoy
