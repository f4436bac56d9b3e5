#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <type_traits>

#include "convoy/group.h"

namespace convoy {

struct MpiOptions {
  std::string name = "mpi";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // of operations, and of making it
  // Ranks compare their calls before data is touched; a mismatch is an error on all of them.
  // Without it, a mismatch is undefined behavior of MPI. Costs a small all-gather for each
  // operation; also switched on by CONVOY_DEBUG=detail.
  bool check = false;
};

// An MPI_Comm of any MPI: a pointer or a number.
template <class T>
concept MpiCommunicator = std::is_pointer_v<T> || std::is_integral_v<T>;

namespace detail {
ProcessGroup from_mpi(const void* communicator, std::size_t bytes, const MpiOptions& options);
}

// A group of the ranks of an MPI communicator, for programs that have their own MPI_Init: on a copy
// of it, so that messages of the program and of the group do not meet. Collective. The program may
// use MPI meanwhile, calls MPI_Finalize itself, and must not use the group afterwards.
//
// A template, so that this header needs no mpi.h. The communicator must be of the MPI that
// libconvoy_mpi.so was built with. kUnsupported if that file is not there, or if the program has
// initialised MPI for fewer threads than MPI_THREAD_SERIALIZED; with that level the program itself
// must not call MPI while an operation of the group is under way.
template <MpiCommunicator Communicator>
ProcessGroup from_mpi(Communicator communicator, const MpiOptions& options = {}) {
  return detail::from_mpi(&communicator, sizeof communicator, options);
}

}  // namespace convoy
