#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// What the C++ sides of bench/coll.py have in common. A side is a library under measurement: a
// program whose ranks stay up and wait, asleep, for cases, so that sides can take turns case by
// case. The same few lines measure all of them.
namespace bench {

struct Case {
  std::string op;    // all_reduce, broadcast, ...
  std::string type;  // f32, bf16
  std::string path;  // group: memory that the ranks share, where the side has it; private
  std::size_t bytes = 0;
  double seconds = 0;  // about how long to measure each variant
};

class Side {
 public:
  virtual ~Side() = default;

  // Makes ready for calls of this case. Returns names of the ways to do it, each of which is
  // measured; none: the side cannot do it.
  virtual std::vector<std::string> prepare(const Case& next) = 0;
  virtual void call(std::size_t variant) = 0;
  // What the call reads on this rank: written anew before each call.
  virtual std::span<std::byte> input() = 0;

  virtual void barrier() = 0;
  virtual double largest(double value) = 0;  // over all ranks
};

// Serves cases until the driver goes away. The folder BENCH_SIDE has a pipe with the cases for each
// rank, named by its number, and one for rank 0's answers.
int serve(int rank, Side& side);

}  // namespace bench
