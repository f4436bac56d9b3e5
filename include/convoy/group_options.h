#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/reduce_op.h"

namespace convoy {

class Store;

// Options of single calls. `timeout` is a duration or a Deadline; not set: the group's own.
struct CallOptions {
  Timeout timeout = {};
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // of kPremulSum
  Timeout timeout = {};
  Rounding rounding = Rounding::kNone;  // kUnsupported unless ranks share memory, see can_round()
};
struct RootOptions {
  int root = 0;
  Timeout timeout = {};
};
struct RootReduceOptions {
  int root = 0;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;
  Timeout timeout = {};
};
struct SplitsOptions {
  std::vector<std::int64_t> output_splits = {};  // rows by rank; empty: equal parts
  std::vector<std::int64_t> input_splits = {};
  Timeout timeout = {};
};
struct MessageOptions {
  int tag = 0;
  Timeout timeout = {};
};
struct SplitOptions {
  std::string name = {};                 // empty: made from the parent's
  std::chrono::milliseconds timeout{0};  // of the new group's operations; 0: the parent's
};

// Of a group on a backend that was made elsewhere: ProcessGroup::from().
struct AdoptOptions {
  std::string name = {};                   // empty: the backend's group name
  std::shared_ptr<Store> store = nullptr;  // for split and split_by, with fresh keys
  std::chrono::milliseconds timeout{0};    // 0: the backend's
};

inline constexpr int kAnySource = -1;

// What the object collectives take and give.
template <class T>
concept ByteString = std::same_as<T, std::string> || std::same_as<T, std::vector<std::byte>> ||
                     std::same_as<T, std::vector<std::uint8_t>>;

}  // namespace convoy
