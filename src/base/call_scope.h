#pragma once

#include "convoy/call_site.h"

namespace convoy {

// While one lives, what this thread does was asked for at that place of the user's program. Scopes
// nest; the outermost counts: a library that calls itself is not what the user wants to read.
class CallScope {
 public:
  explicit CallScope(const CallSite& where) noexcept;
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ~CallScope();

 private:
  bool outermost_;
};

// That of this thread's outermost scope; without a file if there is none.
const CallSite& current_call_site() noexcept;

}  // namespace convoy
