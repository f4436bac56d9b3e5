#include "optim/stepped_parameter.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"

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

// What its memory holds are its values, without holes.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
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
  // Conjugates and negatives may be mere bits on what lies in memory, as in the backward of conj().
  const at::Tensor values = gradient.resolve_conj().resolve_neg();
  const bool fits = !values._is_zerotensor() && (parameter.is_non_overlapping_and_dense()
                                                     ? values.strides().equals(parameter.strides())
                                                     : values.is_contiguous());
  return fits ? values : made_like(parameter).copy_(values);
}

bool SteppedParameter::is_as_before() const {
  return can_step(parameter) &&
         std::all_of(states.begin(), states.end(), [this](const at::Tensor& state) {
           return !state.defined() || (state.scalar_type() == parameter.scalar_type() &&
                                       state.sizes().equals(parameter.sizes()));
         });
}

bool SteppedParameter::make_states(const OptimizerRule& rule) {
  const at::NoGradGuard no_grad;
  if (!is_as_before()) {
    fail(ErrorKind::kInvalidArgument, "a parameter is now ", parameter.scalar_type(), " of sizes ",
         parameter.sizes(), ": its optimizer was not made for that");
  }
  const bool first = !states[0].defined();
  for (at::Tensor& state : states) {
    if (state.defined()) state = laid_out(state);
  }
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (!keeps_state(rule, k) || states[k].defined()) continue;
    states[k] = made_like(parameter);
    // Both parts of complex numbers, as torch.optim has it.
    (states[k].is_complex() ? at::view_as_real(states[k]) : states[k])
        .fill_(k == 0 ? initial_state(rule) : 0);
  }
  return first;
}

void SteppedParameter::step_made(const OptimizerRule& rule, bool first, const at::Tensor& gradient,
                                 double scale) {
  const at::NoGradGuard no_grad;
  const bool plain = is_plain(parameter);
  const at::Tensor work =
      plain ? parameter.detach() : made_like(parameter).copy_(parameter.detach());
  ++steps;
  StepTensors tensors{work, gradient, {}};
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if (keeps_state(rule, k)) tensors.states[k] = states[k];
  }
  run_step(rule, {.number = steps, .first = first, .gradient_scale = scale}, tensors);
  if (!plain) at::Tensor(parameter).copy_(work);
  parameter.unsafeGetTensorImpl()->bump_version();
}

void SteppedParameter::step_rows_made(const OptimizerRule& rule, bool first,
                                      const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  ++steps;
  const at::Tensor rows = gradient._indices()[0];
  at::Tensor all = parameter.detach();
  StepTensors tensors{all.index_select(0, rows).resolve_conj().resolve_neg(),
                      gradient._values().resolve_conj().resolve_neg().contiguous(),
                      {}};
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
