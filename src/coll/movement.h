#pragma once

#include <span>

#include "coll/call.h"

namespace convoy::coll {

// Who sends what to whom in an operation that moves data without combining it, in bytes. The same
// on every rank, computed from the call and, where counts differ by rank, from all ranks' counts.
class Movement {
 public:
  // `counts` are elements by source and target; only looked at where they differ by rank.
  Movement(const Call& call, int rank, int size, std::span<const std::uint64_t> counts)
      : call_(call), kind_(call.signature.op), rank_(rank), size_(size), counts_(counts) {}

  // Every receiver gets the same bytes of a source: they need to be staged once only.
  bool multicast() const {
    return kind_ == OpKind::kBroadcast || kind_ == OpKind::kAllGather ||
           kind_ == OpKind::kAllGatherV;
  }
  // All that a source sends, whether to one rank or to many.
  std::size_t contribution(int source) const;
  std::size_t sent(int source, int target) const;
  // Where in the source's input the target's bytes begin.
  std::size_t offset(int source, int target) const;

  // On this rank: what goes to `target`, and where what comes from `source` belongs.
  View outgoing(int target) const;
  View incoming(int source) const;

 private:
  std::size_t part() const { return call_.signature.count * call_.element(); }
  bool is_root(int rank) const { return rank == static_cast<int>(call_.signature.root); }
  std::size_t table_bytes(int source, int target) const {
    return counts_[static_cast<std::size_t>(source) * static_cast<std::size_t>(size_) +
                   static_cast<std::size_t>(target)] *
           call_.element();
  }

  const Call& call_;
  OpKind kind_;
  int rank_;
  int size_;
  std::span<const std::uint64_t> counts_;
};

}  // namespace convoy::coll
