# convoy_layer(<layer> <library> source...): adds a layer's sources (relative to the calling folder).
function(convoy_layer layer library)
  target_sources(${library} PRIVATE ${ARGN})
endfunction()

# Our own code: language level, sanitizers, warnings.
function(convoy_own target)
  target_link_libraries(${target} PRIVATE convoy_flags convoy_warnings)
endfunction()

# convoy_test(<name> SOURCES ... [LIBRARIES ...] [LABELS ...] [TORCH] [SERIAL] [HELPER]): a GoogleTest binary with the
# project's main (rank re-execution, leak oracle), each test known to ctest. HELPER: ctest does not
# know it; another test runs it.
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
    if(CONVOY_PCH)
      target_precompile_headers(${name} REUSE_FROM convoy_test_pch)
    endif()
  endif()
  if(arg_HELPER)
    return()
  endif()
  set(properties TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}" ENVIRONMENT "OMP_NUM_THREADS=1")
  if(arg_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES ${properties})
endfunction()
