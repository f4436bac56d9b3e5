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
  fail_unfinished(running, outcome);
}

template <class Start, class Whole>
void MpiMedium::complete(const Running& running, std::size_t bytes, const Start& start,
                         const Whole& whole) {
  constexpr std::size_t kLeast = 3073;  // from here on the meeting is the smaller cost
  if (!may_wait_ || bytes < kLeast) return complete(running, start);
  complete(running, [&](MPI_Request* request) { return MPI_Ibarrier(data_.get(), request); });
  try {
    check(whole(), "MPI");
  } catch (const Error& error) {
    fail_run(running, error.kind(), error.what());
  }
}

}  // namespace convoy::mpi
