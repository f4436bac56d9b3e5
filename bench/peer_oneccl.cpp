// oneCCL's side of bench/coll.py: its C++ interface and a communicator of CPU ranks.
#include <bit>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <thread>

#include "peer_buffers.h"

// oneCCL's library for CPUs calls Intel's tracer through these pointers where they are set. What
// defines them does not come with it.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {
void* __itt_domain_create_ptr__3_0 = nullptr;
void* __itt_event_create_ptr__3_0 = nullptr;
void* __itt_event_end_ptr__3_0 = nullptr;
void* __itt_event_start_ptr__3_0 = nullptr;
void* __itt_metadata_add_ptr__3_0 = nullptr;
void* __itt_string_handle_create_ptr__3_0 = nullptr;
void* __itt_task_begin_ptr__3_0 = nullptr;
void* __itt_task_end_ptr__3_0 = nullptr;
void* __itt_thread_set_name_ptr__3_0 = nullptr;
}
// NOLINTEND(readability-identifier-naming)

namespace {

class OneCcl final : public bench::Side {
 public:
  explicit OneCcl(ccl::communicator comm)
      : comm_(std::move(comm)), ranks_(static_cast<std::size_t>(comm_.size())) {}

  std::vector<std::string> prepare(const bench::Case& next) override {
    case_ = next;
    const bool bf16 = next.type == "bf16";
    type_ = bf16 ? ccl::datatype::bfloat16 : ccl::datatype::float32;
    count_ = next.bytes / (bf16 ? 2 : 4);
    return buffers_.prepare(next) ? std::vector<std::string>{""} : std::vector<std::string>{};
  }

  void call(std::size_t) override {
    void* const in = buffers_.in();
    void* const out = buffers_.out();
    const auto sum = ccl::reduction::sum;
    if (case_.op == "all_reduce") {
      ccl::allreduce(in, in, count_, type_, sum, comm_).wait();
    } else if (case_.op == "broadcast") {
      ccl::broadcast(in, count_, type_, 0, comm_).wait();
    } else if (case_.op == "reduce_scatter") {
      ccl::reduce_scatter(in, out, count_ / ranks_, type_, sum, comm_).wait();
    } else if (case_.op == "all_gather") {
      ccl::allgather(in, out, count_ / ranks_, type_, comm_).wait();
    } else if (case_.op == "all_to_all") {
      ccl::alltoall(in, out, count_ / ranks_, type_, comm_).wait();
    } else if (case_.op == "ping_pong") {
      if (comm_.rank() == 0) {
        ccl::send(in, count_, type_, 1, comm_).wait();
        ccl::recv(in, count_, type_, 1, comm_).wait();
      } else if (comm_.rank() == 1) {
        ccl::recv(in, count_, type_, 0, comm_).wait();
        ccl::send(in, count_, type_, 0, comm_).wait();
      }
    } else {
      barrier();
    }
  }

  std::span<std::byte> input() override { return buffers_.input(case_, ranks_); }
  void barrier() override { ccl::barrier(comm_).wait(); }
  double largest(double value) override {
    ccl::allreduce(&value, &value, 1, ccl::datatype::float64, ccl::reduction::max, comm_).wait();
    return value;
  }

  // The operations must be right before they may be fast.
  void check() {
    for (const char* type : {"f32", "bf16"}) {
      for (const std::size_t bytes :
           {std::size_t{8}, std::size_t{256} << 10, std::size_t{3} << 20}) {
        check({.op = "all_reduce", .type = type, .path = "private", .bytes = bytes});
      }
    }
    for (const char* op : {"reduce_scatter", "all_gather", "broadcast", "all_to_all"}) {
      check(
          {.op = op, .type = "f32", .path = "private", .bytes = ranks_ * (std::size_t{32} << 10)});
    }
  }

 private:
  // Every rank gives its number, plus a pattern that fits into each part: the result is the sum, or
  // the number of the rank whose part it is.
  void check(const bench::Case& next) {
    prepare(next);
    const auto rank = static_cast<std::size_t>(comm_.rank());
    for (std::size_t i = 0; i < count_; ++i) write(i, static_cast<float>(rank + i % 8));
    call(0);
    const bool scattered = next.op == "reduce_scatter";
    const bool sums = scattered || next.op == "all_reduce";
    for (std::size_t i = 0; i < (scattered ? count_ / ranks_ : count_); ++i) {
      const std::size_t owner = next.op == "broadcast" ? 0 : i * ranks_ / count_;
      const std::size_t sum = ranks_ * (ranks_ - 1) / 2 + ranks_ * (i % 8);
      if (read(i) == static_cast<float>(sums ? sum : owner + i % 8)) continue;
      throw std::runtime_error(next.op + " " + next.type + " is wrong at " + std::to_string(i) +
                               " on rank " + std::to_string(rank));
    }
  }

  // Of bf16 the upper half of a float: small whole numbers need no more.
  void write(std::size_t i, float value) {
    if (type_ == ccl::datatype::float32) {
      reinterpret_cast<float*>(buffers_.in())[i] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(buffers_.in())[i] =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    }
  }
  float read(std::size_t i) const {
    const std::byte* result = buffers_.out() != nullptr ? buffers_.out() : buffers_.in();
    if (type_ == ccl::datatype::float32) return reinterpret_cast<const float*>(result)[i];
    const auto upper =
        static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(result)[i]);
    return std::bit_cast<float>(upper << 16);
  }

  ccl::communicator comm_;
  std::size_t ranks_;
  bench::Case case_;
  ccl::datatype type_ = ccl::datatype::float32;
  std::size_t count_ = 0;
  bench::PeerBuffers buffers_;
};

// By the driver, or by Intel MPI's mpirun.
int number(const char* name, const char* from_mpirun) {
  const char* value = std::getenv(name);
  if (!value) value = std::getenv(from_mpirun);
  if (!value) throw std::runtime_error(std::string(name) + " is not set");
  return std::atoi(value);
}

// Rank 0's address goes to the others through a file in the driver's folder.
std::shared_ptr<ccl::kvs> meet(int rank) {
  const char* folder = std::getenv("BENCH_SIDE");
  const std::string file = std::string(folder ? folder : ".") + "/kvs";
  if (rank == 0) {
    auto kvs = ccl::create_main_kvs();
    const auto address = kvs->get_address();
    std::ofstream(file + ".new", std::ios::binary)
        .write(address.data(), static_cast<std::streamsize>(address.size()));
    std::filesystem::rename(file + ".new", file);  // so that nobody reads a half
    return kvs;
  }
  for (int tries = 0; tries < 3000 && !std::filesystem::exists(file); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ccl::kvs::address_type address{};
  if (!std::ifstream(file, std::ios::binary).read(address.data(), std::ssize(address))) {
    throw std::runtime_error("rank 0 has left no address in " + file);
  }
  return ccl::create_kvs(address);
}

}  // namespace

int main() {
  try {
    const int rank = number("RANK", "PMI_RANK");
    const int ranks = number("WORLD_SIZE", "PMI_SIZE");
    ccl::init();
    OneCcl side(ccl::create_communicator(ranks, rank, meet(rank)));
    side.check();
    return bench::serve(rank, side);
  } catch (const std::exception& error) {
    std::cerr << "bench_oneccl: " << error.what() << std::endl;
    return 1;
  }
}
