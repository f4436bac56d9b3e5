// The cases of letters.h over MPI, rank 0 and rank 1: one round, as a line of JSON.
// Without the C++ bindings of old, which need a library of their own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include "letters.h"

namespace {

constexpr int kLetterTag = 1;
constexpr int kLargeTag = 2;
constexpr int kQuitTag = 3;

class MpiPipe {
 public:
  explicit MpiPipe(int peer) : peer_(peer) {}

  void send() { send_bytes(bench::kLetterBytes, kLetterTag); }
  void send_large() { send_bytes(static_cast<int>(bench::kLargeBytes), kLargeTag); }
  void send_quit() { send_bytes(0, kQuitTag); }
  void receive() { take(); }
  // The tag of what came.
  int take() {
    MPI_Status status;
    MPI_Recv(memory_.data(), static_cast<int>(memory_.size()), MPI_BYTE, peer_, MPI_ANY_TAG,
             MPI_COMM_WORLD, &status);
    return status.MPI_TAG;
  }

 private:
  void send_bytes(int bytes, int tag) {
    MPI_Send(memory_.data(), bytes, MPI_BYTE, peer_, tag, MPI_COMM_WORLD);
  }

  const int peer_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(bench::kLargeBytes);
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MpiPipe pipe(1 - rank);
  if (rank == 0) {
    pipe.send(), pipe.receive();
    for (int i = 0; i < 2; ++i) pipe.send_large(), pipe.receive();
    bench::print_medians(bench::letter_cases(pipe));
    pipe.send_quit();
  } else {
    while (pipe.take() != kQuitTag) pipe.send();
  }
  MPI_Finalize();
  return 0;
}
