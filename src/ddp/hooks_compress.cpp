// Comm hooks that round gradients to 16 bits.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/reduce_bucket.h"

namespace convoy::hooks {
namespace {

bool is_short(const at::Tensor& tensor) { return tensor.element_size() <= 2; }

HookResult compress(const GradBucket& bucket, at::ScalarType type, Rounding rounding) {
  const at::NoGradGuard no_grad;
  const at::Tensor& buffer = bucket.buffer();
  const ProcessGroup& group = bucket.group();
  if (buffer.numel() == 0 || is_short(buffer)) return all_reduce(bucket);
  const at::Tensor flat = buffer.is_complex() ? at::view_as_real(buffer).view({-1}) : buffer;
  if (group.can_round() && flat.scalar_type() == at::kFloat) {
    return {group.all_reduce_async(flat, {.op = ReduceOp::kAvg, .rounding = rounding}), buffer};
  }
  // Sums of 16 bits overflow soon: who cannot average gets what is divided already.
  const bool divides = !averages(group);
  const at::Tensor encoded = (divides ? flat / group.size() : flat).to(type);
  const GradReduce reduce = divides ? GradReduce::kSum : GradReduce::kMean;
  return reduce_bucket(group, encoded, reduce, 1)
      .then([flat, buffer](const at::Tensor& reduced) -> at::Tensor {
        flat.copy_(reduced);
        return buffer;
      });
}

CommHook wrapper(CommHook hook, at::ScalarType type, const char* name) {
  if (!hook)
    fail(ErrorKind::kInvalidArgument, name,
         ": the hook is an empty function; pass one that can be called");
  return [hook = std::move(hook), type](const GradBucket& bucket) {
    const at::Tensor& buffer = bucket.buffer();
    if (buffer.is_complex() || is_short(buffer)) return hook(bucket);
    const at::NoGradGuard no_grad;
    return hook(bucket.with(buffer.to(type)))
        .then([buffer](const at::Tensor& reduced) -> at::Tensor {
          if (!reduced.defined() || reduced.numel() != buffer.numel()) return reduced;
          buffer.copy_(reduced.reshape({-1}));
          return buffer;
        });
  };
}

}  // namespace

HookResult fp16_compress(const GradBucket& bucket) {
  return compress(bucket, at::kHalf, Rounding::kF16);
}
HookResult bf16_compress(const GradBucket& bucket) {
  return compress(bucket, at::kBFloat16, Rounding::kBF16);
}

CommHook fp16_compress_wrapper(CommHook hook) {
  return wrapper(std::move(hook), at::kHalf, "fp16_compress_wrapper");
}
CommHook bf16_compress_wrapper(CommHook hook) {
  return wrapper(std::move(hook), at::kBFloat16, "bf16_compress_wrapper");
}

}  // namespace convoy::hooks
