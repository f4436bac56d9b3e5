#pragma once

#include <version>
#ifdef __cpp_lib_source_location
#include <source_location>
#endif

namespace convoy {

// A place in a program. As the last parameter of a function, with current() as its default, it is
// where the function was called: users write nothing. std::source_location does the same, where
// there is one: clang 14 has none.
struct CallSite {
  const char* file = nullptr;  // nullptr: not known. Text that lives as long as the program
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
