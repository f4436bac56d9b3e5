#pragma once

#include <cerrno>
#include <string>

#include "base/concat.h"
#include "convoy/error.h"

namespace convoy {

// "No such file or directory (errno 2)".
std::string errno_text(int code);
// What a failed system call means to the caller.
ErrorKind errno_kind(int code);

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

// Throws what errno says, with the kind it maps to; `parts` say what was being done.
template <class... Parts>
[[noreturn]] void fail_errno(const Parts&... parts) {
  const int code = errno;
  throw Error(errno_kind(code), concat(parts..., ": ", errno_text(code)));
}

}  // namespace convoy

// An invariant of ours; the text names it. Checked in every build: the cost is a branch.
#define CONVOY_CHECK(condition, ...)                                          \
  do {                                                                        \
    if (!(condition)) [[unlikely]]                                            \
      ::convoy::fail(::convoy::ErrorKind::kInternal,                          \
                     "check failed: " #condition " (" __FILE__ ":", __LINE__, \
                     ") " __VA_OPT__(, ) __VA_ARGS__);                        \
  } while (false)

// As CONVOY_CHECK, in hot paths: only in builds without NDEBUG.
#ifdef NDEBUG
#define CONVOY_DCHECK(condition, ...) static_cast<void>(0)
#else
#define CONVOY_DCHECK(condition, ...) CONVOY_CHECK(condition __VA_OPT__(, ) __VA_ARGS__)
#endif
