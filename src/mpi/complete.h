#pragma once

// The waiting of MpiMedium: included by the files that implement it.

#include "mpi/medium.h"

namespace convoy::mpi {

template <class Start>
void MpiMedium::complete(const Running& running, const Start& start) {
  MPI_Request request = MPI_REQUEST_NULL;
  Finish outcome = Finish::kDone;
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
  if (outcome == Finish::kDone) [[likely]]
    return;
  leave_to_mpi(request);
  fail_unfinished(running, outcome);
}

template <class Start, class Whole>
void MpiMedium::complete(const Running& running, std::size_t bytes, const Start& start,
                         const Whole& whole) {
  // Below, the meeting would cost more than it gains.
  if (!may_wait_ || bytes <= kEagerBytes) return complete(running, start);
  meet_all(running);
  try {
    check(whole(), "MPI");
  } catch (const Error& error) {
    fail_run(running, error.kind(), error.what());
  }
}

}  // namespace convoy::mpi
