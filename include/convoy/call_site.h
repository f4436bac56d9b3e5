#pragma once

#include <version>
#ifdef __cpp_lib_source_location
#include <source_location>
#endif

namespace convoy {

// A source location: file, function and line. Use it as the last parameter of a function, with
// current() as the default argument: it is then the location of the call, and callers pass nothing.
// It replaces std::source_location, which clang 14 does not have, and converts from it where there
// is one.
struct CallSite {
  const char* file = nullptr;  // nullptr: unknown. The text must live as long as the program
  const char* function = nullptr;
  unsigned line = 0;

  static constexpr CallSite current(const char* file = __builtin_FILE(),
                                    const char* function = __builtin_FUNCTION(),
                                    unsigned line = __builtin_LINE()) noexcept {
    return {file, function, line};
  }

  constexpr CallSite() noexcept = default;
  constexpr CallSite(const char* in_file, const char* in_function, unsigned at_line) noexcept
      : file(in_file), function(in_function), line(at_line) {}
#ifdef __cpp_lib_source_location
  constexpr CallSite(const std::source_location& place) noexcept
      : CallSite(place.file_name(), place.function_name(), place.line()) {}
#endif
};

}  // namespace convoy
