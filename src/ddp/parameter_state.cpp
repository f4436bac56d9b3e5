#include "ddp/parameter_state.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "ddp/checks.h"

namespace convoy {

void GradientHistory::set_aside(at::Tensor& gradient, bool sums_once) {
  const auto is_gone = [&] { return !gradient.defined() || is_zero(gradient); };
  if (summed.defined() && !is_untouched(gradient) && is_gone()) summed.reset();
  mixed = mixed && !is_gone();
  if (!sums_once || mixed || !reduced) return;
  reduced = false;
  if (!is_seen(gradient)) return;  // the user's own
  summed = gradient.detach().clone();
  if (gradient.requires_grad()) {  // may be part of a loss
    gradient = at::zeros_like(summed);
  } else {
    gradient.zero_();
  }
  note(gradient);
}

void GradientHistory::look_for_mixing(const at::Tensor& gradient, bool sums_once) {
  if (!gradient.defined()) return;
  const bool changed_once = is_seen(gradient) && gradient._version() == seen_version + 1;
  if (reduced && sums_once) mixed |= changed_once;
  if (!summed.defined() || changed_once || at::GradMode::is_enabled()) return;
  if (is_seen(gradient)) {
    mixed = true;  // zeroed before, or scaled: that is not to be seen any more
  } else {
    summed.reset();  // dropped before
  }
}

void GradientHistory::added(const at::Tensor& gradient) {
  used = computed = true;
  reduced = false;
  if (summed.defined()) note(gradient);
}

bool GradientHistory::open(const at::Tensor& gradient) {
  reduced = reduced && is_seen(gradient);
  return reduced && !is_untouched(gradient);
}

void GradientHistory::close(at::Tensor& gradient, const End& end) {
  const bool was_summed = summed.defined();
  if (was_summed) {
    gradient = gradient.defined() ? gradient.add_(summed) : std::move(summed);
    summed.reset();
  }
  const bool stays_local = std::exchange(left_local, false);
  // What nobody has used is what it was: reduced, or not.
  if (end.good && (end.has_all || was_summed) && gradient.defined() && !end.deferred &&
      !stays_local) {
    reduced = true;
    note(gradient);
  } else if (!end.good) {
    reduced = false;
  } else if (reduced && gradient.defined()) {
    note(gradient);  // may be another tensor since it lies in a bucket
    if (end.touched) seen_version = -1;
  }
  used = stays_local;
  computed = false;
}

}  // namespace convoy
