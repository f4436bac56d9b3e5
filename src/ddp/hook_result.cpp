#include <ATen/core/ivalue_inl.h>

#include "base/error.h"
#include "convoy/reducer.h"

namespace convoy {

HookResult::HookResult(at::Tensor result)
    : finish_([result = std::move(result)] { return result; }) {}

HookResult::HookResult(Work work, at::Tensor result)
    : finish_([work = std::move(work), result = std::move(result)] {
        work.wait();
        return result;
      }) {}

HookResult::HookResult(Work work, std::function<at::Tensor()> finish)
    : finish_([work = std::move(work), finish = std::move(finish)] {
        work.wait();
        return finish();
      }) {}

HookResult::HookResult(c10::intrusive_ptr<c10::ivalue::Future> future)
    : finish_([future = std::move(future)] {
        if (!future) fail(ErrorKind::kInvalidArgument, "a comm hook returned no future");
        future->waitAndThrow();
        const c10::IValue value = future->value();
        if (value.isTensor()) return value.toTensor();
        if (value.isTensorList() && !value.toTensorList().empty()) {
          return at::Tensor(value.toTensorList().get(0));
        }
        fail(ErrorKind::kInvalidArgument, "the future of a comm hook holds ", value.tagKind(),
             ", not a tensor");
      }) {}

HookResult HookResult::then(std::function<at::Tensor(at::Tensor)> step) && {
  return HookResult(
      Work(), [before = std::move(finish_), step = std::move(step)] { return step(before()); });
}

at::Tensor HookResult::wait() { return finish_(); }

}  // namespace convoy
