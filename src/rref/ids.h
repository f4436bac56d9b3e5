#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "agent/call.h"

namespace convoy::rref {

using agent::Failure;
using agent::WorkerId;

// Of a worker that comes back under the same name, another one. Never 0.
using Incarnation = std::uint64_t;

// A value that references refer to. Those that `creator` makes at `owner` are numbered from 1.
struct RRefId {
  WorkerId owner = 0;
  WorkerId creator = 0;
  Incarnation incarnation = 0;  // the creator's
  std::uint64_t number = 0;

  friend bool operator==(const RRefId&, const RRefId&) = default;
  friend auto operator<=>(const RRefId&, const RRefId&) = default;
};
static_assert(sizeof(RRefId) == 24);
// "(worker 2, #7 of worker 0)"
std::string to_string(const RRefId& id);

struct RRefIdHash {
  std::size_t operator()(const RRefId& id) const noexcept {
    std::uint64_t hash = id.number * 0x9e3779b97f4a7c15ull;
    hash ^= (id.incarnation + id.creator) * 0xff51afd7ed558ccdull + (hash >> 29);
    return static_cast<std::size_t>(hash ^ (hash >> 32));
  }
};

// What a call that creates a value at its owner has with it. Goes as it lies in memory.
struct CreationHead {
  RRefId id;
  std::uint64_t fork = 0;
};
static_assert(sizeof(CreationHead) == 32);

// A reference on its way to another worker. Goes as it lies in memory.
struct Passed {
  RRefId id;
  Incarnation owner_incarnation = 0;
  std::uint64_t fork = 0;     // the receiver's, if the owner sends it: else 0
  std::uint64_t passage = 0;  // numbers those from this sender to this receiver; kReply
  static constexpr std::uint64_t kReply = std::uint64_t{1} << 63;  // goes with an answer
};
static_assert(sizeof(Passed) == 48);

// PyTorch's names.
struct DebugInfo {
  std::uint64_t num_owner_rrefs = 0;      // values here that others may refer to
  std::uint64_t num_pending_users = 0;    // references here that their owners have not confirmed
  std::uint64_t num_pending_futures = 0;  // waiting for a value, here
  std::uint64_t num_forks = 0;            // references of others to values here
};

}  // namespace convoy::rref
