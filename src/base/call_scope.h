#pragma once

#include <cstdint>

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

// What the library does when it calls a group by itself, told in errors and records: a line of ours
// means nothing to users.
struct Purpose {
  const char* what = nullptr;  // "backward": text that lives as long as the program; nullptr: none
  std::uint64_t number = 0;    // "backward 12"; 0: it is not counted
  std::uint64_t owner = 0;     // whose, the same on all ranks; 0: nobody's
  std::uint64_t tag = 0;       // must be the same on all ranks
};

// While one lives, this thread calls groups for that purpose. Scopes nest; the innermost counts.
class PurposeScope {
 public:
  explicit PurposeScope(const Purpose& purpose) noexcept;
  PurposeScope(const PurposeScope&) = delete;
  PurposeScope& operator=(const PurposeScope&) = delete;
  ~PurposeScope();

 private:
  const Purpose before_;
  const CallScope site_;
};

// That of this thread's innermost scope; without a text if there is none.
const Purpose& current_purpose() noexcept;

}  // namespace convoy
