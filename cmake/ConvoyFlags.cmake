# Every compile flag of our code comes from here. GCC ignores a precompiled header whose -O, -g, -D
# or position independence differ from the user's, so no target adds flags of its own; settings go
# into the generated config.h.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)

add_library(convoy_flags INTERFACE)
target_compile_features(convoy_flags INTERFACE cxx_std_20)
# -fPIC here, because CMake gives executables -fPIE, with which a library's precompiled header
# cannot be used.
target_compile_options(convoy_flags INTERFACE
  -fPIC -fno-semantic-interposition -fstack-protector-strong
  $<$<CXX_COMPILER_ID:GNU>:-Werror=invalid-pch>)
target_link_options(convoy_flags INTERFACE -Wl,-z,relro,-z,now)

# Warnings are separate: code that is not ours (torch, generated) is included as SYSTEM. GCC's
# -Wconversion leaves sign conversions out; clang is told to do the same.
add_library(convoy_warnings INTERFACE)
target_compile_options(convoy_warnings INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
  # GCC 12 warns about "a" + std::string at -O3 without cause (GCC bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  # And about std::string(n, c) + "x" in code that it has instrumented, in several ways.
  "$<$<AND:$<CXX_COMPILER_ID:GNU>,$<BOOL:${CONVOY_SANITIZE}>>:-Wno-array-bounds;-Wno-stringop-overread;-Wno-stringop-overflow>"
  # ThreadSanitizer does not know fences, which libtorch's headers have. Ours are not compiled for it (os/wait.h).
  "$<$<AND:$<CXX_COMPILER_ID:GNU>,$<STREQUAL:${CONVOY_SANITIZE},thread>,$<BOOL:${CONVOY_BUILD_TORCH}>>:-Wno-tsan>"
  # In unity builds GCC takes a source for a header, in which types of anonymous namespaces are an error.
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<BOOL:${CONVOY_UNITY}>>:-Wno-subobject-linkage>
  $<$<BOOL:${CONVOY_WERROR}>:-Werror>)

if(CONVOY_SANITIZE STREQUAL "address")
  # Without vptr: it reads objects through a pipe, and reports sound ones where our tests have used up
  # the descriptors.
  target_compile_options(convoy_flags INTERFACE -fsanitize=address,undefined -fno-sanitize=vptr
    -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  target_link_options(convoy_flags INTERFACE -fsanitize=address,undefined)
elseif(CONVOY_SANITIZE STREQUAL "thread")
  target_compile_options(convoy_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(convoy_flags INTERFACE -fsanitize=thread)
elseif(CONVOY_SANITIZE)
  message(FATAL_ERROR "CONVOY_SANITIZE is '${CONVOY_SANITIZE}'; known: address, thread")
endif()

find_program(CONVOY_CCACHE ccache)
if(CONVOY_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Nothing that uses a precompiled header is cached without the sloppiness, and, with GCC, without
  # the flag that shows ccache which one was used.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CONVOY_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  target_compile_options(convoy_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endif()

# What the fuzzers run must be instrumented too. Only together with a sanitizer, whose run-time gives
# the other programs of the build empty versions of what the instrumentation calls.
if(CONVOY_BUILD_FUZZERS AND CONVOY_SANITIZE)
  target_compile_options(convoy_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
