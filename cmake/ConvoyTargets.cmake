# convoy_layer(<layer> <library> source...): adds a layer's sources (relative to the calling folder).
function(convoy_layer layer library)
  target_sources(${library} PRIVATE ${ARGN})
endfunction()

# convoy_public_headers(<library> header...): headers of include/convoy that are installed with it.
function(convoy_public_headers library)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/include/convoy/)
  target_sources(${library} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include
                 FILES ${ARGN})
endfunction()

# Our own code: language level, sanitizers, warnings.
function(convoy_own target)
  target_link_libraries(${target} PRIVATE convoy_flags convoy_warnings)
endfunction()

# convoy_pch_target(<name> <header>): compiles the header once; others take it with
# convoy_use_pch(<target> <name>). GCC accepts it because every flag comes from convoy_flags.
function(convoy_pch_target name header)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${name}.cpp CONTENT "" @ONLY)
  add_library(${name} OBJECT ${PROJECT_BINARY_DIR}/generated/${name}.cpp)
  convoy_own(${name})
  target_link_libraries(${name} PRIVATE torch Threads::Threads)
  target_precompile_headers(${name} PRIVATE <${header}>)
endfunction()

function(convoy_use_pch target name)
  if(CONVOY_PCH)
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()

# convoy_test(<name> SOURCES ... [LIBRARIES ...] [LABELS ...] [TIMEOUT s] [TORCH] [SERIAL] [HELPER]):
# a GoogleTest binary with the project's main (rank re-execution, leak oracle), each test known to
# ctest. The label `long` keeps tests for `make test-full`. HELPER: ctest does not know it; another
# test runs it.
function(convoy_test name)
  cmake_parse_arguments(arg "TORCH;SERIAL;HELPER" "TIMEOUT" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON)  # names in the stack dumps
  convoy_own(${name})
  target_link_libraries(${name} PRIVATE convoy_test_support convoy_core ${arg_LIBRARIES})
  if(arg_TORCH)
    target_link_libraries(${name} PRIVATE convoy)
    convoy_use_pch(${name} convoy_test_pch)
  endif()
  if(arg_HELPER)
    return()
  endif()
  set(properties TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "OMP_NUM_THREADS=1")
  if(arg_LABELS)  # an empty value would vanish from the list and shift the rest
    list(APPEND properties LABELS "${arg_LABELS}")
  endif()
  if(arg_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES ${properties})
endfunction()
