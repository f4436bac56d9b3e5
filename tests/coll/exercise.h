#pragma once

#include <array>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "support.h"

namespace convoy::coll::test {

enum class Op {
  kBarrier,
  kMonitoredBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kReduceScatterV,
  kAllGatherV,
  kGatherV,
  kScatterV,
  kAllToAllV,
  kAllReduceCoalesced,
  kReduceScatterCoalesced,
  kBroadcastCoalesced,
  kAllGatherCoalesced,
};
inline constexpr int kOps = 19;
std::string_view name_of(Op op);
inline void PrintTo(Op op, std::ostream* out) { *out << name_of(op); }
bool reduces(Op op);
inline std::vector<Op> all_ops() {
  std::vector<Op> ops;
  for (int i = 0; i < kOps; ++i) ops.push_back(static_cast<Op>(i));
  return ops;
}

// One collective of a test program, the same on all ranks.
struct Step {
  Op op = Op::kBarrier;
  DataType type = DataType::kI32;
  ReduceOp reduce = ReduceOp::kSum;
  std::size_t count = 0;  // of each part; where parts differ, about so many
  int root = 0;
  bool in_place = false;     // where that has a meaning
  std::uint64_t salt = 0;    // of the data
  std::uint64_t places = 0;  // bits: which buffers of which ranks are in group memory
};

// Runs a step on one rank, on buffers of its own, and knows what must come out. Every rank derives
// everybody's data from the salt.
class Exercise {
 public:
  Exercise(Group& group, const Step& step);

  void run();
  Work start(const Group::Callback& done = nullptr);
  // After it: the outputs are what plain arithmetic says, and inputs are untouched.
  void check() const;

 private:
  // A buffer and what must be in it at the end.
  struct Part {
    Region* region;
    std::size_t offset;
    Buffer expected;
  };

  std::size_t elements(int from, int to) const;
  Buffer data(int from, int to) const;
  Buffer combined(int to) const;
  Buffer expected_from(int from) const;
  Region& add_region(std::size_t bytes);
  Place next_place();
  void prepare_plain();
  void prepare_pieces();
  void prepare_coalesced();
  Call call() const;

  Group& group_;
  Step step_;
  int rank_;
  int size_;
  int placed_ = 0;
  std::vector<std::unique_ptr<Region>> regions_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::vector<Piece> inputs_;
  std::vector<Piece> outputs_;
  std::vector<Part> checks_;
};

}  // namespace convoy::coll::test
