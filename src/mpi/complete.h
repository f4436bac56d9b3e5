#pragma once

// The waiting of MpiMedium: included by the files that implement it.

#include "mpi/medium.h"

namespace convoy::mpi {

template <class Start>
void MpiMedium::complete(const Running& running, const Start& start) {
  MPI_Request request = MPI_REQUEST_NULL;
  Outcome outcome = Outcome::kDone;
  try {
    {
      const Library::Turn turn;
      check(start(&request), "MPI");
    }
    outcome = finish({&request, 1}, running.call.deadline, stop_);
  } catch (const Error& error) {
    leave_to_mpi(request);  // parts of it may be under way
    fail_run(running, error.kind(), error.what());
  }
  if (outcome == Outcome::kDone) [[likely]]
    return;
  leave_to_mpi(request);
  if (outcome == Outcome::kStopped) check_failed(running);
  fail_run(running, ErrorKind::kTimeout,
           concat("Timed out waiting for other ranks, of which MPI does not tell who is missing "
                  "(monitored_barrier does); last completed #",
                  running.number - 1));
}

}  // namespace convoy::mpi
