// MPI's side of bench/coll.py; started by mpirun.
// Without the C++ bindings of old, which need a library of their own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <bit>

#include "peer_buffers.h"

namespace {

// MPI has no bf16: a user's operation on 16-bit words, as fast as the compiler makes it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("default", "avx2")))
#endif
void add_bf16(void* input, void* inout, int* count, MPI_Datatype*) {
  const auto* a = static_cast<const std::uint16_t*>(input);
  auto* b = static_cast<std::uint16_t*>(inout);
  for (int i = 0; i < *count; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(a[i]) << 16);
    const float y = std::bit_cast<float>(static_cast<std::uint32_t>(b[i]) << 16);
    const auto sum = std::bit_cast<std::uint32_t>(x + y);
    b[i] = static_cast<std::uint16_t>((sum + 0x7fff + (sum >> 16 & 1)) >> 16);
  }
}

class Mpi final : public bench::Side {
 public:
  Mpi(int rank, int ranks) : rank_(rank), ranks_(ranks) { MPI_Op_create(&add_bf16, 1, &bf16_sum_); }
  ~Mpi() override { MPI_Op_free(&bf16_sum_); }

  std::vector<std::string> prepare(const bench::Case& next) override {
    case_ = next;
    const bool bf16 = next.type == "bf16";
    type_ = bf16 ? MPI_UINT16_T : MPI_FLOAT;
    sum_ = bf16 ? bf16_sum_ : MPI_SUM;
    count_ = static_cast<int>(next.bytes / (bf16 ? 2 : 4));
    return buffers_.prepare(next) ? std::vector<std::string>{""} : std::vector<std::string>{};
  }

  void call(std::size_t) override {
    if (case_.op == "all_reduce") {
      MPI_Allreduce(MPI_IN_PLACE, buffers_.in(), count_, type_, sum_, MPI_COMM_WORLD);
    } else if (case_.op == "broadcast") {
      MPI_Bcast(buffers_.in(), count_, type_, 0, MPI_COMM_WORLD);
    } else if (case_.op == "reduce_scatter") {
      MPI_Reduce_scatter_block(buffers_.in(), buffers_.out(), count_ / ranks_, type_, sum_,
                               MPI_COMM_WORLD);
    } else if (case_.op == "all_gather") {
      MPI_Allgather(buffers_.in(), count_ / ranks_, type_, buffers_.out(), count_ / ranks_, type_,
                    MPI_COMM_WORLD);
    } else if (case_.op == "all_to_all") {
      MPI_Alltoall(buffers_.in(), count_ / ranks_, type_, buffers_.out(), count_ / ranks_, type_,
                   MPI_COMM_WORLD);
    } else if (case_.op == "ping_pong") {
      if (rank_ == 0) {
        MPI_Send(buffers_.in(), count_, type_, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(buffers_.in(), count_, type_, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank_ == 1) {
        MPI_Recv(buffers_.in(), count_, type_, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(buffers_.in(), count_, type_, 0, 0, MPI_COMM_WORLD);
      }
    } else {
      MPI_Barrier(MPI_COMM_WORLD);
    }
  }

  std::span<std::byte> input() override {
    return buffers_.input(case_, static_cast<std::size_t>(ranks_));
  }
  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }
  double largest(double value) override {
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return value;
  }

 private:
  int rank_;
  int ranks_;
  MPI_Op bf16_sum_ = MPI_OP_NULL;
  bench::Case case_;
  MPI_Datatype type_ = MPI_FLOAT;
  MPI_Op sum_ = MPI_SUM;
  int count_ = 0;
  bench::PeerBuffers buffers_;
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int status = 0;
  {
    Mpi side(rank, ranks);
    status = bench::serve(rank, side);
  }
  MPI_Finalize();
  return status;
}
