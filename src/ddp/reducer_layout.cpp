// Reducer: which parameters travel, and in which buckets.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/bucket_plan.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"
#include "tensor/memory.h"

namespace convoy {

// Ranks may disagree about what changed, and only the verdict tells: until then buckets stay.
void Reducer::Impl::look_at_parameters() {
  layout_.changed = false;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    ParameterState& parameter = parameters_[i];
    parameter.active = tensors_[i].requires_grad();
    const bool in_bucket = parameter.bucket != ParameterPlace::kNone;
    if (layout_.order.empty() || alone_ || parameter.active == (in_bucket || parameter.sparse))
      continue;
    layout_.changed |= in_bucket || !parameter.sparse;
    at::Tensor& gradient = tensors_[i].mutable_grad();
    if (in_bucket && gradient.defined()) gradient = gradient.detach().clone();
  }
}

// Gradients arrive in about the same order in every step: buckets filled in that order are complete
// one after the other. Every rank takes rank 0's, or in a Join that of the first with inputs.
void Reducer::Impl::agree_on_order() {
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});  // the last ones mostly come first
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    constexpr auto kNever = std::numeric_limits<std::size_t>::max();
    const auto arrival = [&](std::size_t i) {
      return parameters_[i].round.arrival == 0 ? kNever : parameters_[i].round.arrival;
    };
    return arrival(a) < arrival(b);
  });
  const at::Tensor table = at::empty({static_cast<std::int64_t>(order.size()) + 1}, at::kLong);
  auto* const entries = table.mutable_data_ptr<std::int64_t>();
  std::copy(order.begin(), order.end(), entries);
  entries[order.size()] = round_.arrivals == 0 ? 1 : 0;
  group_.broadcast(table, {.root = join_.speaker()});
  std::vector<bool> seen(order.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    const auto i = static_cast<std::size_t>(entries[k]);
    CONVOY_CHECK(i < seen.size() && !seen[i], "rank 0 sent an invalid order of parameters");
    seen[i] = true;
    order[k] = i;
  }
  layout_.guessed = entries[order.size()] != 0;
  layout_.order = std::move(order);
  lay_out();
}

std::vector<std::vector<std::size_t>> Reducer::Impl::plan(bool delayed) const {
  std::vector<PlanItem> items;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::ScalarType type = travels_as(i);
    items.push_back({type, tensors_[i].device(),
                     tensors_[i].numel() * static_cast<std::int64_t>(c10::elementSize(type))});
  }
  std::vector<std::size_t> chosen;
  for (const std::size_t i : layout_.order) {
    const ParameterState& parameter = parameters_[i];
    if (parameter.active && !parameter.sparse && parameter.bucket == ParameterPlace::kNone &&
        parameter.delayed == delayed) {
      chosen.push_back(i);
    }
  }
  return plan_buckets(items, chosen, layout_.caps, PlanOrder::kByLastItem);
}

void Reducer::Impl::lay_out() {
  const auto old = std::exchange(layout_.buckets, {});  // until the gradients have left them
  std::vector<bool> deferred(parameters_.size());
  for (const Bucket& bucket : old) {
    for (const std::size_t i : bucket.parameters) deferred[i] = bucket.deferred;
  }
  for (ParameterState& parameter : parameters_) parameter.bucket = ParameterPlace::kNone;
  observer_.stats().bytes = 0;
  add_buckets();
  // The sharded optimizer has not had these gradients yet, or they must be reduced for it.
  for (Bucket& bucket : layout_.buckets) {
    bucket.deferred =
        defers(bucket) && std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                                      [&](std::size_t i) { return deferred[i]; });
    if (bucket.deferred) continue;
    for (const std::size_t i : bucket.parameters) {
      parameters_[i].left_local = deferred[i] && tensors_[i].grad().defined();
    }
  }
  if (observer_.debug() == DebugLevel::kOff) return;
  for (std::size_t b = 0; b < layout_.buckets.size(); ++b) {
    log_info(where(b), ": ", layout_.buckets[b].parameters.size(), " parameters, ",
             layout_.buckets[b].buffer.nbytes(), " bytes");
  }
}

at::ScalarType Reducer::Impl::travels_as(std::size_t index) const {
  const at::ScalarType own = parameters_[index].type;
  return c10::isFloatingType(own) ? options_.reduce_dtype().value_or(own) : own;
}

// For the parameters that are in none.
void Reducer::Impl::add_buckets() {
  const at::NoGradGuard no_grad;
  for (const bool delayed : {false, true}) {
    for (auto& list : plan(delayed)) {
      const at::ScalarType type = travels_as(list.front());
      place(make_bucket(group_, tensors_, std::move(list), type));
      share_buckets();
      move_gradients(layout_.buckets.back());  // one after the other: what they leave is freed
    }
  }
}

void Reducer::Impl::place(Bucket&& made) {
  const std::size_t b = layout_.buckets.size();
  Bucket& bucket = layout_.buckets.emplace_back(std::move(made));
  bucket.pending = bucket.parameters.size();
  observer_.stats().bytes += static_cast<std::uint64_t>(bucket.buffer.nbytes());
  for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    const std::size_t i = bucket.parameters[slot];
    parameters_[i].bucket = b;
    parameters_[i].slot = slot;
  }
}

// Those that are there already, into their bucket.
void Reducer::Impl::move_gradients(Bucket& bucket) {
  for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    const std::size_t i = bucket.parameters[slot];
    at::Tensor& gradient = tensors_[i].mutable_grad();
    const bool moves = options_.gradient_as_bucket_view && gradient.defined() &&
                       !gradient.requires_grad() && gradient.layout() == c10::kStrided &&
                       gradient.scalar_type() == bucket.buffer.scalar_type() &&
                       gradient.sizes().equals(bucket.slots[slot].sizes());
    if (!moves) continue;
    if (can_stay(i)) {
      give_pages_back(bucket.slots[slot]);
      continue;
    }
    bucket.slots[slot].copy_(gradient);
    gradient = bucket.handle(slot);
  }
}

std::uint64_t Reducer::Impl::layout_hash() const {
  std::string text = concat(serial_, " ", static_cast<int>(options_.reduce.kind()));
  if (options_.static_graph) text += 's';
  for (const ParameterState& parameter : parameters_) {
    text += parameter.active ? '+' : '-';
    if (parameter.round.rows.defined()) text += concat("rows of ", hash_of(parameter.round.rows));
  }
  return hash_text(text);
}

void Reducer::Impl::register_comm_hook(CommHook hook) {
  if (!hook)
    fail(ErrorKind::kInvalidArgument, "the hook is an empty function; pass one that can be called");
  if (users_.hook)
    fail(ErrorKind::kInvalidArgument, "there is a comm hook already; a model has one");
  if (observer_.stats().backwards > 0 || round_.open) {
    fail(ErrorKind::kInvalidArgument, "it is too late after ", observer_.stats().backwards,
         " backwards; register before the first one");
  }
  if (options_.reduce.kind() != GradReduce::Kind::kMean) {
    fail(ErrorKind::kInvalidArgument,
         "a comm hook combines gradients itself; GradReduce must be kMean");
  }
  if (join_.divides_by_live()) refuse_hook_in_join();
  // First on the group that others use: they may have none to register.
  const PurposeScope scope({.what = "register_comm_hook"});
  agree(group_, "register_comm_hook", {});
  users_.hook_group = own_group(group_);
  users_.hook = std::move(hook);
  alone_ = false;
}

void Reducer::Impl::register_consumer(GradConsumer consumer) {
  if (round_.open || in_backward_) {
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of a backward; call it after");
  }
  if (!consumer.function) {
    fail(ErrorKind::kInvalidArgument, "the consumer has an empty function; give it one");
  }
  consumer.takes.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!consumer.takes[i]) continue;
    if (parameters_[i].sparse) {
      fail(ErrorKind::kUnsupported, "gradients of ", parameters_[i].name,
           " are sparse; leave it to an optimizer of its own");
    }
    if (parameters_[i].taken) {
      fail(ErrorKind::kInvalidArgument, "gradients of ", parameters_[i].name,
           " are taken by another optimizer already; give each parameter to one");
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].taken |= consumer.takes[i];
    parameters_[i].dropped |= consumer.takes[i] && !consumer.keeps;
  }
  users_.consumers.push_back(std::move(consumer));
  alone_ = false;
}

void Reducer::Impl::consume() {
  for (const auto& port : users_.ports) port->finish(verdict_.used());
  if (users_.consumers.empty()) return;
  std::vector<GradBucket> reduced;
  for (std::size_t i = 0; i < layout_.buckets.size(); ++i) {
    if (layout_.buckets[i].skipped) continue;
    reduced.push_back(
        BucketAccess::make(layout_.buckets, i, tensors_, group_, observer_.stats().backwards + 1));
  }
  for (const GradConsumer& consumer : users_.consumers) consumer.function(reduced, verdict_.used());
}

void check_weight(const GradReduce& reduce) {
  if (reduce.kind() != GradReduce::Kind::kWeighted) return;
  if (!(reduce.samples() >= 0 && std::isfinite(reduce.samples()))) {
    fail(ErrorKind::kInvalidArgument, "gradients are weighted by ", reduce.samples(),
         " samples; the number must be finite, and 0 or more");
  }
}

void Reducer::Impl::set_reduce(GradReduce reduce) {
  check_weight(reduce);
  if (round_.open)
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of a backward; call it before");
  if (users_.hook && reduce.kind() != GradReduce::Kind::kMean) {
    fail(ErrorKind::kInvalidArgument,
         "the model has a comm hook, which combines gradients itself; GradReduce must be kMean");
  }
  options_.reduce = reduce;
  weigh_norms();
}

}  // namespace convoy
