# convoy_layer(<layer> <library> source...): adds a layer's sources (relative to the calling folder).
function(convoy_layer layer library)
  target_sources(${library} PRIVATE ${ARGN})
  convoy_unity(${library} ${layer} ${ARGN})
endfunction()

# convoy_unity(<target> <name> source...): with CONVOY_UNITY, compiles these sources of a target
# CONVOY_UNITY at a time: torch's headers and templates are then paid for once a group. No two
# sources of a group may use one name in anonymous namespaces. Sources with options of their own
# stay alone (CMake sees to that).
function(convoy_unity target name)
  if(NOT CONVOY_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  list(LENGTH ARGN count)
  # Groups of equal size: five and four instead of eight and one.
  math(EXPR groups "(${count} + ${CONVOY_UNITY} - 1) / ${CONVOY_UNITY}")
  set(index 0)
  foreach(source ${ARGN})
    math(EXPR group "${index} * ${groups} / ${count}")
    set_source_files_properties(${source} TARGET_DIRECTORY ${target}
                                PROPERTIES UNITY_GROUP ${name}_${group})
    math(EXPR index "${index} + 1")
  endforeach()
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

# convoy_pch_target(<name> HEADERS <header>... LIBRARIES <library>...): compiles the headers once;
# others take them with convoy_use_pch(<target> <name>). GCC accepts it because every flag comes from
# convoy_flags (the optimisation level alone may differ).
function(convoy_pch_target name)
  cmake_parse_arguments(arg "" "" "HEADERS;LIBRARIES" ${ARGN})
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${name}.cpp CONTENT "" @ONLY)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/generated/${name}.cpp)
  convoy_own(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} Threads::Threads)
  list(TRANSFORM arg_HEADERS REPLACE "(.+)" "<\\1>")
  target_precompile_headers(${name} PRIVATE ${arg_HEADERS})
endfunction()

function(convoy_use_pch target name)
  if(CONVOY_PCH)
    target_precompile_headers(${target} REUSE_FROM ${name})
    # What the package of GTest defines, the precompiled header was made with.
    if(name MATCHES "^convoy_(torch|tensor)_pch$" AND convoy_test_headers)
      target_compile_definitions(${target} PRIVATE GTEST_HAS_PTHREAD=1)
    endif()
  endif()
endfunction()

# Test code runs once: what it costs is compiling it.
function(convoy_own_test target)
  convoy_own(${target})
  target_compile_options(${target} PRIVATE -O1)
endfunction()

# convoy_shared_sources([TORCH | TENSORS] source...): sources of several tests, which are compiled once:
# convoy_test takes the object where its SOURCES name one of them. Objects and not an archive: some
# register themselves.
function(convoy_shared_sources)
  cmake_parse_arguments(arg "TORCH;TENSORS" "" "" ${ARGN})
  foreach(source ${arg_UNPARSED_ARGUMENTS})
    cmake_path(ABSOLUTE_PATH source NORMALIZE)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE name)
    string(REGEX REPLACE "[^a-z0-9_]" "_" name once_${name})
    add_library(${name} OBJECT EXCLUDE_FROM_ALL ${source})
    convoy_own_test(${name})
    target_link_libraries(${name} PRIVATE convoy_test_support)
    if(arg_TORCH)
      target_link_libraries(${name} PRIVATE convoy)
      convoy_use_pch(${name} convoy_torch_pch)
    elseif(arg_TENSORS)
      target_link_libraries(${name} PRIVATE convoy)
      convoy_use_pch(${name} convoy_tensor_pch)
    else()
      convoy_use_pch(${name} convoy_test_pch)
    endif()
    set_property(GLOBAL PROPERTY convoy_object_of_${source} $<TARGET_OBJECTS:${name}>)
  endforeach()
endfunction()

function(convoy_take_shared result)
  set(sources)
  foreach(source ${ARGN})
    set(path ${source})
    cmake_path(ABSOLUTE_PATH path NORMALIZE)
    get_property(object GLOBAL PROPERTY convoy_object_of_${path})
    if(object)
      list(APPEND sources ${object})
    else()
      list(APPEND sources ${source})
    endif()
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# convoy_test(<name> SOURCES ... [LIBRARIES ...] [LABELS ...] [TIMEOUT s] [TORCH | TENSORS] [UNITY] [APART] [HELPER]): a
# GoogleTest binary with the project's main (rank re-execution, leak oracle). ctest knows each test; of a program that
# uses torch each suite, because it takes 0.3 s to start. APART, and the label `long`, which keeps tests for
# `make test-full`: each test all the same, in a process and with a TIMEOUT of its own; ctest says what was skipped.
# TORCH: it uses all of torch; TENSORS: without torch::nn and torch::optim, which compiles in half of the time (it
# includes torch/types.h). UNITY: its sources are compiled together (see convoy_unity). HELPER: ctest does not know it;
# another test runs it.
function(convoy_test name)
  cmake_parse_arguments(arg "TORCH;TENSORS;UNITY;APART;HELPER" "TIMEOUT" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  set(by_suite OFF)
  set(timeout 120)
  if((arg_TORCH OR arg_TENSORS) AND NOT arg_APART AND NOT "long" IN_LIST arg_LABELS)
    set(by_suite ON)
    set(timeout 400)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT ${timeout})
  endif()
  convoy_take_shared(sources ${arg_SOURCES})
  add_executable(${name} ${sources})
  set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON)  # names in the stack dumps
  convoy_own_test(${name})
  target_link_libraries(${name} PRIVATE convoy_test_support convoy_core ${arg_LIBRARIES})
  if(arg_TORCH)
    target_link_libraries(${name} PRIVATE convoy)
    convoy_use_pch(${name} convoy_torch_pch)
  elseif(arg_TENSORS)
    target_link_libraries(${name} PRIVATE convoy)
    convoy_use_pch(${name} convoy_tensor_pch)
  else()
    convoy_use_pch(${name} convoy_test_pch)
  endif()
  if(arg_UNITY)
    convoy_unity(${name} ${name} ${arg_SOURCES})
  endif()
  if(arg_HELPER)
    return()
  endif()
  set(properties TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "OMP_NUM_THREADS=1")
  if(arg_LABELS)  # an empty value would vanish from the list and shift the rest
    list(APPEND properties LABELS "${arg_LABELS}")
  endif()
  if(by_suite)
    list(APPEND properties COST 60)  # first, until ctest has measured them
    set(include ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake)
    file(GENERATE OUTPUT ${include} CONTENT "set(name ${name})
set(program [[$<TARGET_FILE:${name}>]])
set(list [[${CMAKE_CURRENT_BINARY_DIR}/${name}_list.cmake]])
set(properties \"${properties}\")
include([[${CMAKE_CURRENT_FUNCTION_LIST_DIR}/ConvoySuites.cmake]])
")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${include})
  else()
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
      PROPERTIES ${properties})
  endif()
endfunction()
