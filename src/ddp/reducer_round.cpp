// Reducer: one reduction of all gradients, until the last bucket is under way.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {

std::string Reducer::Impl::head() const {
  return concat("backward ", stats_.backwards + 1, ", group \"", group_.name(), "\", rank ",
                group_.rank(), " of ", size_, ": ");
}

Purpose Reducer::Impl::purpose() const {
  return {.what = round_, .number = stats_.backwards + 1, .owner = serial_};
}

std::string Reducer::Impl::where(std::size_t bucket) const {
  const auto& list = buckets_[bucket].parameters;
  return concat("bucket ", bucket, " of ", buckets_.size(), " (", parameters_[list.front()].name,
                list.size() > 1 ? concat(" to ", parameters_[list.back()].name) : "", ")");
}

void Reducer::Impl::trouble(Ending outcome, std::string text) {
  if (outcome > outcome_) {
    outcome_ = outcome;
    text_ = std::move(text);
  }
  if (outcome >= Ending::kDisturbed) end_hook_group();
}

// Others may wait inside of a hook for operations that will not come. (Where the hook has no group
// of its own, that ends the group: better than to wait.)
void Reducer::Impl::end_hook_group() {
  if (!hook_ || !hook_group_ || size_ == 1) return;
  abort_because(hook_group_, text_.empty() ? "a backward failed there" : text_);
  if (hook_group_ != group_) hook_group_ = {};
}

// --- its beginning ---

void Reducer::Impl::open(const Sink* sink) {
  open_ = true;
  begun_ = false;
  first_ = true;
  first_in_port_ = first_is_meeting_ = false;
  met_ = !hook_ || !compares_ || size_ == 1;
  meeting_.reset();
  announced_ = false;
  next_ = 0;
  arrivals_ = 0;
  outcome_ = Ending::kGood;
  text_.clear();
  stats_.copy_time = stats_.search_time = {};
  timeline_.open(entered_);
  set_sums_aside();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    parameter.reduced = parameter.reduced && parameter.is_seen(gradient);
    parameter.touched = parameter.reduced && !parameter.is_untouched(gradient);
  }
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
  late_now_ = launches_late_ || defers || has_other_reducers(group_, norm_weight_);
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
  for (Parameter& parameter : parameters_) {
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
    for (Parameter& parameter : parameters_) {
      parameter.presumed_unused = in_backward_ && parameter.learnt_unused && !parameter.used;
    }
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

void Reducer::Impl::weigh_norms() {
  norm_weight_->samples = samples_of(options_.reduce);
  norm_weight_->weighted = options_.reduce.kind() == GradReduce::Kind::kWeighted;
}

// The ranks' weights; and whether SyncBatchNorms have weighed with the same ones.
void Reducer::Impl::share_samples() {
  if (options_.reduce.kind() != GradReduce::Kind::kWeighted) {
    return check_norms({1 / norm_weight_->used.value_or(1), 1});
  }
  // A rank that has no inputs any more may have gradients that were not reduced.
  const bool adds = !shadowing_ || std::any_of(parameters_.begin(), parameters_.end(),
                                               [](const Parameter& p) { return p.used; });
  const double samples = adds ? options_.reduce.samples() : 0;
  // By how much it has changed since; less than 0: nothing was weighed, or with nothing.
  const auto used = norm_weight_->used;
  const bool counts = adds && used && (*used > 0 || samples > 0);
  const at::Tensor mine = at::empty({2}, at::kDouble);
  mine[0] = samples;
  mine[1] = counts ? samples / *used : -1;
  at::Tensor all;
  if (!issue([&] { all = group_.all_gather(mine); })) return;
  const auto* const table = all.const_data_ptr<double>();
  double total = 0;
  std::vector<double> changes;
  for (int r = 0; r < size_; ++r) {
    total += table[2 * r];
    if (table[2 * r + 1] >= 0) changes.push_back(table[2 * r + 1]);
  }
  weight_ = total > 0 ? samples / total : 0;
  if (total == 0) {
    trouble(Ending::kRefused,
            "gradients are weighted by samples, and no rank has any: leave this step out, or "
            "set_reduce(GradReduce::weighted(samples)) with what ranks have");
  }
  check_norms(changes);
}

// A SyncBatchNorm weighs when its backward runs: weights that are others when the gradients are
// reduced come too late. Only their proportions count.
void Reducer::Impl::check_norms(const std::vector<double>& changes) {
  const bool same = std::all_of(changes.begin(), changes.end(), [&](double change) {
    return std::abs(change - changes.front()) <= 1e-9 * std::abs(change);
  });
  if (same && !norm_weight_->differs) return;
  trouble(Ending::kRefused,
          "backwards that are reduced together went through a SyncBatchNorm with other weights of "
          "the ranks than these: call set_reduce before the first of them, and not again until "
          "they are reduced");
}

void Reducer::Impl::begin() {
  const PurposeScope scope(purpose());
  begun_ = true;
  if (hook_ && !hook_group_ && !in_late_round_) hook_group_ = own_group(group_);
  share_samples();
  if (options_.skip_all_reduce_unused_params && !order_.empty()) {
    const at::Tensor map = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kByte);
    auto* const used = map.mutable_data_ptr<std::uint8_t>();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = parameters_[i];
      const bool unused = shadowing_ ? !parameter.used : parameter.presumed_unused;
      used[i] = unused || !parameter.active ? 0 : 1;
    }
    const bool asked = issue([&] { group_.all_reduce(map, {.op = ReduceOp::kMax}); });
    for (Bucket& bucket : buckets_) {
      // Nobody knows: then this backward fails, and all ranks leave all of them out.
      bucket.skipped = !asked || std::none_of(bucket.parameters.begin(), bucket.parameters.end(),
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
    return trouble(Ending::kMistaken,
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
  while (next_ < buckets_.size() && buckets_[next_].pending == 0 && have_met()) launch(next_++);
}

// Nobody waits here: backward goes on, and hooks are called when the next gradient comes.
bool Reducer::Impl::have_met() {
  if (met_) return true;
  const PurposeScope scope(purpose());
  try {
    if (!meeting_) {
      meeting_ = group_.barrier_async();
      first_is_meeting_ = std::exchange(first_, false);
    }
    if (!meeting_->done()) return false;
    meeting_->wait();
  } catch (const std::exception&) {
    return false;  // the end of the backward sees to it
  }
  meeting_.reset();
  return met_ = true;
}

void Reducer::Impl::meet_before_hooks() {
  if (std::exchange(met_, true)) return;
  if (const auto meeting = std::exchange(meeting_, std::nullopt)) {
    go_on_if(first_is_meeting_, [&] { meeting->wait(); });
  } else {
    issue([&] { group_.barrier(); });
  }
}

void Reducer::Impl::launch(std::size_t index) {
  const PurposeScope scope(purpose());
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
    if (std::exchange(late_, false)) return;
    if (std::exchange(first_, false)) first_in_port_ = true;
    std::vector<bool> used;
    for (const std::size_t i : bucket.parameters) used.push_back(parameters_[i].used);
    return guarded(index, [&] { port.launched(index, outcome_ == Ending::kGood, used); });
  }
  if (outcome_ >= Ending::kDisturbed && hook_) return;  // the hook's group is no more
  if (!hook_ && std::exchange(late_, false)) return;
  if (!hook_) first_ = false;
  guarded(index, [&] { bucket.result = start(index); });
}

template <class Function>
void Reducer::Impl::guarded(std::size_t bucket, Function function) {
  try {
    function();
  } catch (const Error& e) {
    trouble(Ending::kDisturbed, concat(where(bucket), ": ", e.what()));
  } catch (const std::exception& e) {
    trouble(Ending::kFailed, concat(where(bucket), ": ", e.what()));
  } catch (...) {
    trouble(Ending::kFailed, concat(where(bucket), ": something was thrown"));
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

}  // namespace convoy
