// Reducer: what a round begins with, its names and its troubles.
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
  return concat("backward ", observer_.stats().backwards + 1, ", group \"", group_.name(),
                "\", rank ", group_.rank(), " of ", size_, ": ");
}

Purpose Reducer::Impl::purpose() const {
  return {.what = round_.what, .number = observer_.stats().backwards + 1, .owner = serial_};
}

std::string Reducer::Impl::where(std::size_t bucket) const {
  const auto& list = layout_.buckets[bucket].parameters;
  return concat("bucket ", bucket, " of ", layout_.buckets.size(), " (",
                parameters_[list.front()].name,
                list.size() > 1 ? concat(" to ", parameters_[list.back()].name) : "", ")");
}

void Reducer::Impl::trouble(Ending outcome, std::string text) {
  round_.worsen(outcome, std::move(text));
  if (outcome >= Ending::kDisturbed) end_hook_group();
}

// Others may wait inside of a hook for operations that will not come. (Where the hook has no group
// of its own, that ends the group: better than to wait.)
void Reducer::Impl::end_hook_group() {
  if (!users_.hook || !users_.hook_group || size_ == 1) return;
  abort_because(users_.hook_group, round_.text.empty() ? "a backward failed there" : round_.text);
  if (users_.hook_group != group_) users_.hook_group = {};
}

// --- its beginning ---

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
  const bool adds = !join_.shadows() || std::any_of(parameters_.begin(), parameters_.end(),
                                                    [](const ParameterState& p) { return p.used; });
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
  round_.weight = total > 0 ? samples / total : 0;
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
          "the weights of the ranks changed between backwards that are reduced together and go "
          "through a SyncBatchNorm: call set_reduce before the first of them, and not again until "
          "they are reduced");
}

void Reducer::Impl::begin() {
  const PurposeScope scope(purpose());
  round_.begun = true;
  if (users_.hook && !users_.hook_group && !round_.began_elsewhere)
    users_.hook_group = own_group(group_);
  share_samples();
  if (options_.skip_all_reduce_unused_params && !layout_.order.empty()) {
    const at::Tensor map = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kByte);
    auto* const used = map.mutable_data_ptr<std::uint8_t>();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const ParameterState& parameter = parameters_[i];
      const bool unused = join_.shadows() ? !parameter.used : parameter.round.presumed_unused;
      used[i] = unused || !parameter.active ? 0 : 1;
    }
    const bool asked = issue([&] { group_.all_reduce(map, {.op = ReduceOp::kMax}); });
    for (Bucket& bucket : layout_.buckets) {
      // Nobody knows: then this backward fails, and all ranks leave all of them out.
      bucket.skipped = !asked || std::none_of(bucket.parameters.begin(), bucket.parameters.end(),
                                              [&](std::size_t i) { return used[i] != 0; });
    }
  }
  check_replicas();
}

// Nobody waits here: backward goes on, and hooks are called when the next gradient comes.
bool Reducer::Impl::have_met() {
  if (round_.met) return true;
  const PurposeScope scope(purpose());
  try {
    if (!round_.meeting) {
      round_.meeting = group_.barrier_async();
      round_.first_is_meeting = std::exchange(round_.first, false);
    }
    if (!round_.meeting->done()) return false;
    round_.meeting->wait();
  } catch (const std::exception&) {
    return false;  // the end of the backward sees to it
  }
  round_.meeting.reset();
  return round_.met = true;
}

void Reducer::Impl::meet_before_hooks() {
  if (std::exchange(round_.met, true)) return;
  if (const auto meeting = std::exchange(round_.meeting, std::nullopt)) {
    go_on_if(round_.first_is_meeting, [&] { meeting->wait(); });
  } else {
    issue([&] { group_.barrier(); });
  }
}

}  // namespace convoy
