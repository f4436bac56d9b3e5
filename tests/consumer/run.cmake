# Proves convoy from outside its tree: installs it below WORK, moves the tree (nothing in it may hold
# the path it was installed to), builds tests/consumer against it with the compiler and flags a user
# would have, and runs the programs. With MODE=subdirectory it uses the sources instead.
#
#   cmake -DMODE=install|subdirectory -DSOURCE=... -DBUILD=... -DWORK=... -DTORCH=ON|OFF
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
    foreach(path ${WORK} ${SOURCE})
      string(FIND "${text}" "${path}" position)
      if(NOT position EQUAL -1)
        message(FATAL_ERROR "${file} holds ${path}, a path of the machine that built it")
      endif()
    endforeach()
  endforeach()
  set(where -DCMAKE_PREFIX_PATH=${WORK}/moved)
  if(TORCH)
    string(APPEND where "\\;${TORCH_ROOT}")
  endif()
else()
  set(where -DCONVOY_SOURCE=${SOURCE} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
endif()

run(${CMAKE_COMMAND} -S ${SOURCE}/tests/consumer -B ${WORK}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCONSUMER_TORCH=${TORCH} ${where})
run(${CMAKE_COMMAND} --build ${WORK}/build --parallel 2)
run(${WORK}/build/use_core)
message(STATUS "${output}")
if(TORCH)
  run(${WORK}/build/use_convoy)
  message(STATUS "${output}")
endif()
