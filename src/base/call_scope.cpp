#include "base/call_scope.h"

namespace convoy {
namespace {

thread_local constinit CallSite current;

}  // namespace

CallScope::CallScope(const CallSite& where) noexcept : outermost_(current.file == nullptr) {
  if (outermost_) current = where;
}

CallScope::~CallScope() {
  if (outermost_) current = {};
}

const CallSite& current_call_site() noexcept { return current; }

}  // namespace convoy
