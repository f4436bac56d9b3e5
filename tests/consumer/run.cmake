# Proves convoy from outside its tree: installs it below WORK, moves the tree (nothing in it may hold
# the path it was installed to; torch's is remembered), builds tests/consumer against it with the compiler and flags a user
# would have, and runs the programs. With MODE=subdirectory it uses the sources instead;
# MODE=configure goes no further than their build rules.
#
#   cmake -DMODE=install|subdirectory|configure -DSOURCE=... -DBUILD=... -DWORK=... -DTORCH=ON|OFF
#         -DTORCH_ROOT=... -DCXX=... -DGENERATOR=... -DLAUNCHER=... -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(failed)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${failed}:\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
if(MODE STREQUAL "install")
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
  file(RENAME ${WORK}/first ${WORK}/moved)
  file(GLOB package_files ${WORK}/moved/lib*/cmake/convoy/*.cmake)
  foreach(file ${package_files})
    file(READ ${file} text)
    string(REPLACE "${TORCH_ROOT}" "" text "${text}")
    foreach(path ${WORK} ${SOURCE})
      string(FIND "${text}" "${path}" position)
      if(NOT position EQUAL -1)
        message(FATAL_ERROR "${file} holds ${path}, a path of the machine that built it")
      endif()
    endforeach()
  endforeach()
  run(${WORK}/moved/bin/convoy --version)
  set(where -Dconvoy_ROOT=${WORK}/moved)
else()
  set(where -DCONVOY_SOURCE=${SOURCE} -DCONVOY_TORCH=${TORCH_ROOT} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
endif()

# The torch-free half by itself, then (if it was built) all of it.
function(use what torch)
  run(${CMAKE_COMMAND} -S ${SOURCE}/tests/consumer -B ${WORK}/${what} -G ${GENERATOR}
      -DCMAKE_CXX_COMPILER=${CXX} -DCONSUMER_TORCH=${torch} ${where})
  if(MODE STREQUAL "configure")
    run(${CMAKE_COMMAND} --build ${WORK}/${what} --target ${what} -- -n)  # every command is known
    return()
  endif()
  run(${CMAKE_COMMAND} --build ${WORK}/${what} --parallel 2)
  run(${WORK}/${what}/${what})
  message(STATUS "${output}")
endfunction()
use(use_core OFF)
if(TORCH)
  use(use_convoy ON)
endif()
