#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "optim/optimizer_rule.h"

namespace convoy {

// A parameter that an optimizer steps, and what its rule keeps of it.
struct SteppedParameter {
  std::size_t group = 0;
  at::Tensor parameter;
  std::int64_t steps = 0;
  std::array<at::Tensor, kMostStates> states = {};  // see optimizer_rule.h

  // f32, f64 and their complex types; others are too coarse to add small steps to.
  static bool can_step(const at::Tensor& parameter);
  // A gradient of the parameter's type and sizes as it must lie in memory for step(): as the
  // parameter does or, if that has holes, contiguous; no lazy conjugate. Copied if it does not.
  at::Tensor laid_out(const at::Tensor& gradient) const;
  // False: the parameter got data (set_data) of a type that cannot be stepped, or of other sizes or
  // another type than its states.
  bool is_as_before() const;
  // Makes what the rule keeps, if it is not there yet, and lays it out as the parameter is now.
  // True: state 0 was not there; the next step is told so. kInvalidArgument if not is_as_before().
  bool make_states(const OptimizerRule& rule);
  // `scale` of the gradient.
  void step(const OptimizerRule& rule, const at::Tensor& gradient, double scale = 1) {
    step_made(rule, make_states(rule), laid_out(gradient), scale);
  }
  // With a gradient that is laid out.
  void step_made(const OptimizerRule& rule, bool first, const at::Tensor& gradient, double scale);
  // With a sparse gradient, coalesced: only its rows are changed.
  void step_rows_made(const OptimizerRule& rule, bool first, const at::Tensor& gradient);
  // A state that was saved, for this parameter.
  at::Tensor state_from(const at::Tensor& saved) const;
};

}  // namespace convoy
