// Our sides of bench/coll.py: started on every rank by `convoy run`, or, with the word mpi, by
// mpirun: then the same calls go over backend "mpi".
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>

#include "base/error.h"
#include "coll/group.h"
#include "mpi/module.h"
#include "side.h"

namespace {

using namespace convoy;

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  if (!text) fail(ErrorKind::kInvalidArgument, name, " is not set: run this under `convoy run`");
  return std::atoi(text);
}

coll::DataType type_of(const std::string& name) {
  for (int i = 0; i < coll::kDataTypes; ++i) {
    const auto type = static_cast<coll::DataType>(i);
    if (coll::to_string(type) == name) return type;
  }
  fail(ErrorKind::kInvalidArgument, "unknown type '", name, "'");
}

class Convoy final : public bench::Side {
 public:
  Convoy(std::shared_ptr<coll::Group> group, bool shares)
      : group_(std::move(group)), shares_(shares) {}

  // `bytes` is what a rank puts in, or gets out if that is more.
  std::vector<std::string> prepare(const bench::Case& next) override {
    case_ = next;
    type_ = type_of(next.type);
    ranks_ = static_cast<std::size_t>(group_->size());
    count_ = next.bytes / coll::size_of(type_);
    const bool shared = next.path == "group" && shares_;
    const bool two =
        next.op == "all_to_all" || next.op == "reduce_scatter" || next.op == "all_gather";
    output_ = {};
    buffer_ = Buffer(*group_, shared, next.bytes);
    if (two) output_ = Buffer(*group_, shared, next.bytes);
    if (two || next.op == "all_reduce" || next.op == "broadcast" || next.op == "barrier" ||
        next.op == "ping_pong") {
      return {""};
    }
    return {};
  }

  void call(std::size_t) override {
    if (case_.op == "all_reduce") {
      group_->all_reduce(buffer_.data, buffer_.data, count_, type_);
    } else if (case_.op == "broadcast") {
      group_->broadcast(buffer_.data, buffer_.data, count_, type_, 0);
    } else if (case_.op == "reduce_scatter") {
      group_->run(
          group_->calls().reduce_scatter(buffer_.data, output_.data, count_ / ranks_, type_));
    } else if (case_.op == "all_gather") {
      group_->all_gather(buffer_.data, output_.data, count_ / ranks_, type_);
    } else if (case_.op == "all_to_all") {
      group_->run(group_->calls().all_to_all(buffer_.data, output_.data, count_ / ranks_, type_));
    } else if (case_.op == "ping_pong") {  // there and back
      if (group_->rank() == 0) {
        group_->send(buffer_.data, count_, type_, 1);
        group_->recv(buffer_.data, count_, type_, 1);
      } else if (group_->rank() == 1) {
        group_->recv(buffer_.data, count_, type_, 0);
        group_->send(buffer_.data, count_, type_, 0);
      }
    } else {
      group_->barrier();
    }
  }

  std::span<std::byte> input() override {
    return {buffer_.data, case_.op == "all_gather" ? case_.bytes / ranks_ : case_.bytes};
  }
  void barrier() override { group_->barrier(); }
  double largest(double value) override {
    group_->all_reduce(&value, &value, 1, coll::DataType::kF64, {.op = coll::ReduceOp::kMax});
    return value;
  }

 private:
  struct Buffer {
    Buffer() = default;
    Buffer(coll::Group& group, bool shared, std::size_t bytes) {
      const std::size_t size = (bytes / 64 + 1) * 64;
      if (shared) {
        block = group.allocate(size);
        data = block.data();
      } else {
        memory.reset(static_cast<std::byte*>(std::aligned_alloc(64, size)));
        data = memory.get();
      }
      std::memset(data, 0, size);
    }
    struct Free {
      void operator()(std::byte* p) const { std::free(p); }
    };
    shm::Block block;
    std::unique_ptr<std::byte, Free> memory;
    std::byte* data = nullptr;
  };

  std::shared_ptr<coll::Group> group_;
  bool shares_;  // memory
  bench::Case case_;
  coll::DataType type_ = coll::DataType::kF32;
  std::size_t count_ = 0;
  std::size_t ranks_ = 1;
  Buffer buffer_, output_;
};

// BENCH_READ_PRIVATE=0: as where the kernel forbids it.
bool may_read_private() {
  const char* const wish = std::getenv("BENCH_READ_PRIVATE");
  return !wish || std::strcmp(wish, "0") != 0;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::chrono::seconds kTimeout(120);
  try {
    const bool mpi = argc > 1 && std::strcmp(argv[1], "mpi") == 0;
    auto group =
        mpi ? coll::Group::over(mpi::module().of_world({.name = "bench", .timeout = kTimeout}),
                                kTimeout)
            : coll::Group::create(
                  launcher_store(), environment_number("RANK"), environment_number("WORLD_SIZE"),
                  {.name = "bench", .timeout = kTimeout, .read_private = may_read_private()});
    const int rank = group->rank();
    Convoy side(std::move(group), !mpi);
    return bench::serve(rank, side);
  } catch (const convoy::Error& error) {
    std::cerr << "bench_coll: " << error.what() << "\n";
    return 1;
  }
}
