#include "autograd/step_hook.h"

#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

StepHook& the_step_hook() {
  static StepHook hook = nullptr;
  return hook;
}

}  // namespace

bool set_step_hook(StepHook hook) {
  the_step_hook() = hook;
  return true;
}

StepHook step_hook() {
  CONVOY_CHECK(the_step_hook() != nullptr, "nobody has optimizers");
  return the_step_hook();
}

}  // namespace convoy::autograd::detail
