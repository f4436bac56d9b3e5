#include "base/call_scope.h"

namespace convoy {
namespace {

thread_local constinit CallSite current;
thread_local constinit Purpose purpose_now;

}  // namespace

CallScope::CallScope(const CallSite& where) noexcept : outermost_(current.file == nullptr) {
  if (outermost_) current = where;
}

CallScope::~CallScope() {
  if (outermost_) current = {};
}

const CallSite& current_call_site() noexcept { return current; }

PurposeScope::PurposeScope(const Purpose& purpose) noexcept
    : before_(purpose_now), site_(CallSite(purpose.what, "", 0)) {
  purpose_now = purpose;
}

PurposeScope::~PurposeScope() { purpose_now = before_; }

const Purpose& current_purpose() noexcept { return purpose_now; }

}  // namespace convoy
