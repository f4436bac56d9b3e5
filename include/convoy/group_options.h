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

// Options of one call. `timeout` is a duration (> 0) or a Deadline. Not set: the timeout of the
// group.
struct CallOptions {
  Timeout timeout = {};
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // kPremulSum multiplies inputs by it
  Timeout timeout = {};
  Rounding rounding = Rounding::kNone;  // throws kUnsupported unless can_round()
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
  std::vector<std::int64_t> output_splits = {};  // rows for each rank; empty: equal parts
  std::vector<std::int64_t> input_splits = {};
  Timeout timeout = {};
};
struct MessageOptions {
  int tag = 0;
  Timeout timeout = {};
};
struct SplitOptions {
  std::string name = {};                 // empty: made from the name of the parent group
  std::chrono::milliseconds timeout{0};  // of operations of the new group; 0: as the parent
};

// For ProcessGroup::from(): a group on a backend that was made elsewhere.
struct AdoptOptions {
  std::string name = {};                   // empty: the backend's group name
  std::shared_ptr<Store> store = nullptr;  // for split and split_by; its keys must be unused
  std::chrono::milliseconds timeout{0};    // 0: as the backend
};

inline constexpr int kAnySource = -1;

// The types that object collectives send and return.
template <class T>
concept ByteString = std::same_as<T, std::string> || std::same_as<T, std::vector<std::byte>> ||
                     std::same_as<T, std::vector<std::uint8_t>>;

}  // namespace convoy
