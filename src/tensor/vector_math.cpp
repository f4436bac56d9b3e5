#include "tensor/vector_math.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>

#include "base/log.h"

namespace convoy {
namespace {

// As in ATen/cpu/vml.h.
constexpr at::Tensor (*kFunctions[])(const at::Tensor&) = {
    at::acos, at::asin, at::atan,  at::cos, at::erf,  at::erfc, at::erfinv, at::exp,
    at::log,  at::log2, at::log10, at::sin, at::sqrt, at::tan,  at::tanh,   at::trunc};

bool call_each() {
  try {
    // Neither recorded by autograd nor seen by a profiler or by modes of Python's.
    const at::AutoDispatchBelowADInplaceOrView no_gradients;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
    const at::DisableRecordFunctionGuard no_profiler;
    for (const auto type : {at::kFloat, at::kDouble}) {
      const at::Tensor half = at::full({1}, 0.5, at::TensorOptions(at::kCPU).dtype(type));
      for (const auto function : kFunctions) function(half);
    }
  } catch (const std::exception& e) {
    log_warn("oneMKL's functions could not be called ahead: ", e.what());
  }
  return true;
}

}  // namespace

void warm_vector_math() noexcept { [[maybe_unused]] static const bool called = call_each(); }

}  // namespace convoy
