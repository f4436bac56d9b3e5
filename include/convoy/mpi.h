#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <type_traits>

#include "convoy/group.h"

namespace convoy {

struct MpiOptions {
  std::string name = "mpi";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // of operations and of creation
  // Ranks compare their calls before data is touched; a mismatch throws on all of them. Without it,
  // a mismatch is undefined behavior in MPI. Costs a small all-gather for each operation. Also
  // enabled by CONVOY_DEBUG=detail and CONVOY_LOG=debug.
  bool check = false;
};

// The type MPI_Comm of any MPI implementation: a pointer or an integer.
template <class T>
concept MpiCommunicator = std::is_pointer_v<T> || std::is_integral_v<T>;

namespace detail {
ProcessGroup from_mpi(const void* communicator, std::size_t bytes, const MpiOptions& options);
}

// Makes a group of the ranks of an MPI communicator, for programs that call MPI_Init themselves. It
// uses a duplicate of the communicator, so that messages of the program and of the group are not
// mixed up. Collective, blocks. The program may use MPI at the same time. It calls MPI_Finalize
// itself, and must not use the group afterwards.
//
// It is a template so that this header does not need mpi.h. The communicator must belong to the MPI
// that libconvoy_mpi.so was built with. Throws kUnsupported if that library is missing, for an
// intercommunicator, or if MPI was initialised for less than MPI_THREAD_SERIALIZED. At that level
// the program must not call MPI while an operation of the group runs. Throws kInvalidArgument if
// MPI is not initialised, for MPI_COMM_NULL, or if the timeout is not positive.
template <MpiCommunicator Communicator>
ProcessGroup from_mpi(Communicator communicator, const MpiOptions& options = {}) {
  return detail::from_mpi(&communicator, sizeof(Communicator), options);
}

}  // namespace convoy
