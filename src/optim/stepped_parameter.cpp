#include "optim/stepped_parameter.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

namespace convoy {
namespace {

// A tensor's memory as real numbers.
std::int64_t real_numbers_in(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.is_complex() ? 2 : 1);
}
template <class T>
T* memory_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// All of these lie in memory alike, without holes.
struct StepTensors {
  at::Tensor parameter;
  at::Tensor gradient;
  std::array<at::Tensor, kMostStates> states;
};

template <class T>
void run_step_as(const OptimizerRule& rule, const RuleStep& step, const StepTensors& tensors) {
  const RuleMemory<T> memory{memory_of<T>(tensors.parameter),
                             memory_of<T>(tensors.gradient),
                             {memory_of<T>(tensors.states[0]), memory_of<T>(tensors.states[1]),
                              memory_of<T>(tensors.states[2])}};
  static_assert(kMostStates == 3);
  at::parallel_for(0, real_numbers_in(tensors.parameter), kNormBlock,
                   [&](std::int64_t begin, std::int64_t end) {
                     RuleMemory<T> part{memory.parameter + begin, memory.gradient + begin, {}};
                     for (std::size_t k = 0; k < kMostStates; ++k) {
                       if (memory.states[k] != nullptr) part.states[k] = memory.states[k] + begin;
                     }
                     apply_rule(rule, step, part, static_cast<std::size_t>(end - begin));
                   });
}

void run_step(const OptimizerRule& rule, const RuleStep& step, const StepTensors& tensors) {
  if (at::toRealValueType(tensors.parameter.scalar_type()) == at::kDouble) {
    run_step_as<double>(rule, step, tensors);
  } else {
    run_step_as<float>(rule, step, tensors);
  }
}

// As gradients lie in memory.
at::Tensor made_like(const at::Tensor& parameter) {
  const auto options = parameter.options().requires_grad(false);
  return parameter.is_non_overlapping_and_dense()
             ? at::empty_strided(parameter.sizes(), parameter.strides(), options)
             : at::empty(parameter.sizes(), options);
}

bool keeps_state(const OptimizerRule& rule, std::size_t k) {
  return (states_of(rule) >> k & 1) != 0;
}

}  // namespace

bool SteppedParameter::can_step(const at::Tensor& parameter) {
  const auto type = at::toRealValueType(parameter.scalar_type());
  return type == at::kFloat || type == at::kDouble;
}

at::Tensor SteppedParameter::laid_out(const at::Tensor& gradient) const {
  const bool fits = parameter.is_non_overlapping_and_dense()
                        ? gradient.strides().equals(parameter.strides())
                        : gradient.is_contiguous();
  return fits ? gradient : made_like(parameter).copy_(gradient);
}

bool SteppedParameter::make_states(const OptimizerRule& rule) {
  const at::NoGradGuard no_grad;
  const bool first = !states[0].defined();
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (!keeps_state(rule, k) || states[k].defined()) continue;
    states[k] = made_like(parameter).fill_(k == 0 ? initial_state(rule) : 0);
  }
  return first;
}

void SteppedParameter::step_made(const OptimizerRule& rule, bool first, const at::Tensor& gradient,
                                 double scale) {
  const at::NoGradGuard no_grad;
  const bool dense = parameter.is_non_overlapping_and_dense();
  const at::Tensor work =
      dense ? parameter.detach() : made_like(parameter).copy_(parameter.detach());
  ++steps;
  StepTensors tensors{work, gradient, {}};
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (keeps_state(rule, k)) tensors.states[k] = states[k];
  }
  run_step(rule, {.number = steps, .first = first, .gradient_scale = scale}, tensors);
  if (!dense) at::Tensor(parameter).copy_(work);
  parameter.unsafeGetTensorImpl()->bump_version();
}

void SteppedParameter::step_rows_made(const OptimizerRule& rule, bool first,
                                      const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  ++steps;
  const at::Tensor rows = gradient._indices()[0];
  at::Tensor all = parameter.detach();
  StepTensors tensors{all.index_select(0, rows), gradient._values().contiguous(), {}};
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (keeps_state(rule, k)) tensors.states[k] = states[k].index_select(0, rows);
  }
  run_step(rule, {.number = steps, .first = first}, tensors);
  all.index_copy_(0, rows, tensors.parameter);
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (keeps_state(rule, k)) states[k].index_copy_(0, rows, tensors.states[k]);
  }
  parameter.unsafeGetTensorImpl()->bump_version();
}

at::Tensor SteppedParameter::state_from(const at::Tensor& saved) const {
  const at::NoGradGuard no_grad;
  return made_like(parameter).copy_(saved.reshape(parameter.sizes()));
}

}  // namespace convoy
