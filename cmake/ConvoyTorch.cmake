# Finds libtorch 2.13: CONVOY_TORCH or CMAKE_PREFIX_PATH if it names one, otherwise the torch of the
# project's .venv (tools/bootstrap made it), otherwise the python3 on the path.
set(CONVOY_TORCH "$ENV{CONVOY_TORCH}" CACHE PATH "Folder of a libtorch 2.13 (optional)")
set(CONVOY_TORCH_VERSION 2.13)

if(CONVOY_TORCH)
  list(PREPEND CMAKE_PREFIX_PATH ${CONVOY_TORCH})
else()
  set(venv .venv)
  if(DEFINED ENV{CONVOY_VENV})
    set(venv $ENV{CONVOY_VENV})
  endif()
  cmake_path(ABSOLUTE_PATH venv BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
  if(DEFINED SKBUILD)  # pip builds for the Python that it runs in
    set(CONVOY_PYTHON ${Python_EXECUTABLE} CACHE FILEPATH "")
  endif()
  find_program(CONVOY_PYTHON NAMES python3 python HINTS ${venv}/bin NO_CMAKE_SYSTEM_PATH)
  if(CONVOY_PYTHON)
    execute_process(
      COMMAND ${CONVOY_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      list(APPEND CMAKE_PREFIX_PATH ${torch_root})
    endif()
  endif()
endif()

# Torch's package probes for oneMKL and Kineto and warns about what a CPU build does not need.
set(CMAKE_MESSAGE_LOG_LEVEL_SAVED ${CMAKE_MESSAGE_LOG_LEVEL})
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)  # a project that has us as a subdirectory links it too
find_package(Torch ${CONVOY_TORCH_VERSION} QUIET)
unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
set(CMAKE_MESSAGE_LOG_LEVEL ${CMAKE_MESSAGE_LOG_LEVEL_SAVED})
if(NOT Torch_FOUND)
  message(FATAL_ERROR "libtorch ${CONVOY_TORCH_VERSION} was not found. Run tools/bootstrap (it makes .venv with "
    "torch==2.13.0), set CONVOY_TORCH to an unpacked libtorch, or configure with -DCONVOY_BUILD_TORCH=OFF.")
endif()
# Its optional MKL adds folders that exist on its build machine only; they would end in our RPATH.
if(TARGET caffe2::mkl)
  set_property(TARGET caffe2::mkl PROPERTY INTERFACE_LINK_DIRECTORIES "")
endif()
if(NOT Torch_VERSION VERSION_GREATER_EQUAL 2.13 OR Torch_VERSION VERSION_GREATER_EQUAL 2.14)
  message(FATAL_ERROR "libtorch ${Torch_VERSION} at ${TORCH_INSTALL_PREFIX}: convoy needs 2.13 "
    "(libtorch's C++ interface is not stable between minor versions).")
endif()
message(STATUS "libtorch ${Torch_VERSION}: ${TORCH_INSTALL_PREFIX}")
