// Reducer: the way of a gradient into its bucket, and that of the bucket to the other ranks.
// on_gradient (reducer_backward.cpp) begins it, complete (reducer_end.cpp) ends it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"
#include "tensor/memory.h"

namespace convoy {

// --- into the bucket, or not ---

void Reducer::Impl::make_ready(std::size_t index) {
  ParameterState& parameter = parameters_[index];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  const at::Tensor& slot = layout_.buckets[parameter.bucket].slots[parameter.slot];
  parameter.round.ready = true;
  if (!gradient.defined()) {
    const at::NoGradGuard no_grad;
    slot.zero_();
    return;
  }
  const bool fits = gradient.scalar_type() == slot.scalar_type() || options_.reduce_dtype();
  if (gradient.layout() != c10::kStrided || !fits || !gradient.sizes().equals(slot.sizes())) {
    return trouble(Ending::kMistaken,
                   concat("the gradient of ", parameter.name, " is ",
                          gradient.layout() != c10::kStrided
                              ? std::string("sparse, and the parameter is not listed as sparse")
                              : concat(gradient.scalar_type(), " of sizes ", gradient.sizes(),
                                       ", not ", slot.scalar_type(), " of sizes ", slot.sizes())));
  }
  if (is_alias(gradient, slot)) return;
  parameter.round.stays = can_stay(index);
  if (!parameter.round.stays) copy_in(index);
}

void Reducer::Impl::copy_in(std::size_t index) {
  ParameterState& parameter = parameters_[index];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  const at::Tensor& slot = layout_.buckets[parameter.bucket].slots[parameter.slot];
  const auto start = Clock::now();
  const bool has_history = gradient.requires_grad();
  {
    const at::NoGradGuard no_grad;
    slot.copy_(gradient);
  }
  if (has_history) {
    parameter.round.graph = gradient;
  } else if (options_.gradient_as_bucket_view && slot.scalar_type() == parameter.type) {
    gradient = bucket_of(parameter).handle(parameter.slot);  // frees the copied one
  }
  observer_.stats().copy_time += Clock::now() - start;
}

// True if the gradient lies in shared memory, and nobody but the reduction needs it in its bucket.
// Each rank decides that for itself.
bool Reducer::Impl::can_stay(std::size_t index) const {
  const ParameterState& parameter = parameters_[index];
  const Bucket& bucket = layout_.buckets[parameter.bucket];
  const at::Tensor& slot = bucket.slots[parameter.slot];
  const at::Tensor& gradient = tensors_[index].grad();
  if (!births_ || !travels_in_pieces() || slot.nbytes() < kLeastPiece) return false;
  const ShardPort* const port = port_of(bucket);
  // What is written to while backward runs must be nobody else's, and autograd may make a view of
  // what it still needs the gradient of a parameter: in `w.unsqueeze(0) + x` both get one memory.
  const bool may_stay =
      port == nullptr ? round_.launches_late : port->reads_in_place() && defers(bucket);
  if (users_.hook || join_.is_active() || !users_.consumers.empty() || !may_stay ||
      options_.nonfinite != NonFinite::kIgnore) {
    return false;
  }
  return gradient.defined() && gradient.layout() == c10::kStrided && !gradient.requires_grad() &&
         gradient.scalar_type() == slot.scalar_type() && slot.scalar_type() == parameter.type &&
         gradient.sizes().equals(slot.sizes()) && gradient.strides().equals(slot.strides()) &&
         !gradient.is_conj() && !gradient.is_neg() && is_shared_memory(gradient);
}

// For a parameter whose hook did not run, at the end or when its bucket goes.
void Reducer::Impl::settle(std::size_t index) {
  ParameterState& parameter = parameters_[index];
  const at::Tensor& gradient = tensors_[index].grad();
  const at::NoGradGuard no_grad;
  if (!parameter.active) {  // frozen since the buckets were made
    layout_.buckets[parameter.bucket].slots[parameter.slot].zero_();
    parameter.round.ready = true;
    return;
  }
  if (join_.shadows() && !parameter.used) return add_nothing(index);
  if (!parameter.used && gradient.defined()) {
    parameter.round.kept = gradient.detach().clone();
  }
  make_ready(index);
}

// --- the bucket goes ---

void Reducer::Impl::launch_complete_ones() {
  if (round_.launches_late) return;
  while (round_.next < layout_.buckets.size() && layout_.buckets[round_.next].pending == 0 &&
         have_met())
    launch(round_.next++);
}

void Reducer::Impl::launch(std::size_t index) {
  const PurposeScope scope(purpose());
  Bucket& bucket = layout_.buckets[index];
  bucket.launched = true;
  if (bucket.skipped) return;
  // Whatever happens here, the others count on this bucket.
  guarded(index, [&] {
    for (const std::size_t i : bucket.parameters) {
      if (!parameters_[i].round.ready) settle(i);
    }
  });
  if (options_.nonfinite != NonFinite::kIgnore) check_finite(index);
  observer_.timeline().launched(index);
  bucket.deferred = defers(bucket);
  if (!bucket.deferred) guarded(index, [&] { move_shared_ones(bucket); });
  if (bucket.deferred) {
    ShardPort& port = *port_of(bucket);
    if (!port.overlaps()) return;
    if (std::exchange(round_.late, false)) return;
    if (std::exchange(round_.first, false)) round_.first_in_port = true;
    std::vector<bool> used;
    for (const std::size_t i : bucket.parameters) used.push_back(parameters_[i].used);
    return guarded(index, [&] { port.launched(index, round_.outcome == Ending::kGood, used); });
  }
  if (round_.outcome >= Ending::kDisturbed && users_.hook) return;  // the hook's group is no more
  if (!users_.hook && std::exchange(round_.late, false)) return;
  if (!users_.hook) round_.first = false;
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

// Autograd may give two parameters views of one memory, which must not be reduced twice: those go
// into their bucket.
void Reducer::Impl::move_shared_ones(const Bucket& bucket) {
  for (const std::size_t i : bucket.parameters) {
    ParameterState& parameter = parameters_[i];
    if (!parameter.round.stays || tensors_[i].grad().storage().use_count() == 1) continue;
    parameter.round.stays = false;
    copy_in(i);
  }
}

HookResult Reducer::Impl::start(std::size_t index) {
  Bucket& bucket = layout_.buckets[index];
  if (!users_.hook) {
    HookResult result =
        travels_in_pieces()
            ? reduce_pieces(group_, pieces_of(bucket), bucket.buffer, options_.reduce)
            : reduce_bucket(group_, bucket.buffer, options_.reduce, round_.weight);
    const double scale = join_.scale(options_.reduce, size_);
    if (scale == 1) return result;
    return std::move(result).then([scale](const at::Tensor& mean) { return mean.mul_(scale); });
  }
  try {
    return users_.hook(BucketAccess::make(layout_.buckets, index, tensors_, users_.hook_group,
                                          observer_.stats().backwards + 1));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw std::runtime_error(concat("the comm hook threw: ", e.what()));
  }
}

// The same on all ranks: a signature depends on it.
bool Reducer::Impl::travels_in_pieces() const {
  return !users_.hook && options_.reduce.kind() != GradReduce::Kind::kWeighted &&
         group_.backend_name() == "convoy";
}

// What is reduced of a bucket: large gradients each for itself, wherever they are, and what is
// between them. Sizes are those of all ranks.
std::vector<at::Tensor> Reducer::Impl::pieces_of(const Bucket& bucket) const {
  std::vector<at::Tensor> pieces;
  std::int64_t begin = 0, end = 0;  // of slots that lie side by side, in the buffer
  const auto add_slots = [&] {
    if (end > begin) pieces.push_back(bucket.buffer.slice(0, begin, end));
    begin = end;
  };
  for (std::size_t k = 0; k < bucket.slots.size(); ++k) {
    const at::Tensor& slot = bucket.slots[k];
    const std::size_t i = bucket.parameters[k];
    if (slot.nbytes() >= kLeastPiece) {
      add_slots();
      const at::Tensor& whole = parameters_[i].round.stays ? tensors_[i].grad() : slot;
      pieces.push_back(whole.as_strided({whole.numel()}, {1}));
      begin += slot.numel();
    }
    end += slot.numel();
  }
  add_slots();
  return pieces;
}

}  // namespace convoy
