#pragma once

#include "coll/call.h"

namespace convoy::coll {

// Who sends what to whom in an operation that moves data without combining it, in bytes. The same
// on every rank, computed from the call and, where counts differ by rank, from all ranks' tables.
class Movement {
 public:
  // `tables` gives a rank's CountTable; only asked where the operation has one.
  template <class Tables>
  Movement(const Call& call, int rank, int size, const Tables& tables)
      : call_(call), kind_(call.signature.op), rank_(rank), size_(size) {
    if (!has_table(kind_)) return;
    for (int r = 0; r < size; ++r) tables_[static_cast<std::size_t>(r)] = &tables(r);
  }

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
    return tables_[static_cast<std::size_t>(source)]->send[static_cast<std::size_t>(target)] *
           call_.element();
  }

  const Call& call_;
  OpKind kind_;
  int rank_;
  int size_;
  std::array<const CountTable*, kMaxRanks> tables_;
};

}  // namespace convoy::coll
