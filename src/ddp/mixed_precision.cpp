#include "ddp/mixed_precision.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"

namespace convoy {

void check_mixed_precision(const MixedPrecision& wanted) {
  const auto check = [](const char* name, const std::optional<c10::ScalarType>& type) {
    if (!type || c10::isFloatingType(*type)) return;
    fail(ErrorKind::kInvalidArgument, "mixed_precision: ", name, " is ", *type,
         ", which is not a floating-point type");
  };
  check("param_dtype", wanted.param_dtype);
  check("reduce_dtype", wanted.reduce_dtype);
  check("buffer_dtype", wanted.buffer_dtype);
}

std::string describe(const MixedPrecision& wanted) {
  const auto name = [](const std::optional<c10::ScalarType>& type) {
    return type ? c10::toString(*type) : "-";
  };
  return concat("option mixed_precision: param_dtype ", name(wanted.param_dtype), ", reduce_dtype ",
                name(wanted.reduce_dtype), ", buffer_dtype ", name(wanted.buffer_dtype));
}

bool is_cast(const at::Tensor& tensor, c10::ScalarType type) {
  return tensor.defined() && c10::isFloatingType(tensor.scalar_type()) &&
         tensor.scalar_type() != type;
}

LowPrecisionCopies::LowPrecisionCopies(const std::vector<at::Tensor>& parameters,
                                       c10::ScalarType type)
    : parameters_(parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!is_cast(parameter, type)) continue;
    const at::Tensor data = parameter.detach();
    pairs_.push_back({parameter, data, at::empty_like(data, data.options().dtype(type))});
  }
}

std::vector<at::Tensor> LowPrecisionCopies::originals() const {
  std::vector<at::Tensor> result = parameters_;
  auto pair = pairs_.begin();  // in the same order
  for (at::Tensor& tensor : result) {
    if (pair == pairs_.end() || !tensor.is_same(pair->parameter)) continue;
    if (lowered_) tensor = pair->own;
    ++pair;
  }
  return result;
}

bool LowPrecisionCopies::lower() {
  if (lowered_) return false;
  const at::NoGradGuard no_grad;
  for (Pair& pair : pairs_) {
    pair.own = pair.parameter.detach();  // may have been replaced since, as torch::load does
    pair.copy.copy_(pair.own);
  }
  lower_again();
  return true;
}

void LowPrecisionCopies::lower_again() {
  if (lowered_) return;
  for (const Pair& pair : pairs_) pair.parameter.set_data(pair.copy);
  lowered_ = true;
}

void LowPrecisionCopies::restore(CastGradients which) {
  if (!lowered_) return;
  const at::NoGradGuard no_grad;
  for (Pair& pair : pairs_) {
    pair.parameter.set_data(pair.own);
    at::Tensor& gradient = pair.parameter.mutable_grad();
    if (!gradient.defined() || gradient.scalar_type() != pair.copy.scalar_type()) continue;
    if (which == CastGradients::kAll || gradient.is_sparse()) {
      gradient = gradient.detach().to(pair.own.scalar_type());
    }
  }
  lowered_ = false;
}

}  // namespace convoy
