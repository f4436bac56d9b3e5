#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "coll/types.h"

namespace convoy::coll {

struct GroupOptions {
  std::string name = "world";
  // Of every operation that does not bring its own, and of making the group.
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  // Threads that work on one large operation of this rank, the caller's included.
  int threads = 1;
  // Large private buffers that only move are read straight out of the other process where the
  // kernel allows it (process_vm_readv). All ranks must say the same, or it is not done.
  bool read_private = true;
  // The ranks' numbers in the job, by rank, where they are known. Of a rank that ends before it
  // comes, the launcher may know, and other groups of this process that have such numbers.
  std::vector<int> job_ranks = {};
  // Who else knows: the ranks that have ended ("was killed by ..."). Asked while the group is made.
  std::function<std::map<int, std::string>()> ended = {};
};

struct CallOptions {
  std::chrono::nanoseconds timeout{0};  // 0: the group's
  std::uint64_t tag = 0;                // must be equal on all ranks; part of the fingerprint
  // Likewise: of the tensor that ranks combine or that they get. Where there are pieces, theirs
  // count instead. Must stay valid until the call returns, also that of an _async form.
  Shape shape = {};
};

// Of a message. Messages between two ranks with the same tag arrive in the order in which they were
// sent.
struct MessageOptions {
  std::uint64_t tag = 0;
  std::chrono::nanoseconds timeout{0};  // 0: the group's
};

inline constexpr int kAnyRank = -1;

// One message of a batch.
struct Message {
  enum class Kind { kSend, kReceive } kind = Kind::kSend;
  void* data = nullptr;  // only read of a send
  std::size_t count = 0;
  DataType type = DataType::kF32;
  int peer = 0;  // kAnyRank: receive from whoever sends
  std::uint64_t tag = 0;
};

struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // of kPremulSum
  std::chrono::nanoseconds timeout{0};
  std::uint64_t tag = 0;
  Rounding rounding = Rounding::kNone;  // in shared memory only
  Shape shape = {};                     // as of CallOptions
};

}  // namespace convoy::coll
