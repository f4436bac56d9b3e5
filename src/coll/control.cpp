#include "coll/control.h"

#include <algorithm>

#include "base/concat.h"

namespace convoy::coll {
namespace {

constexpr std::size_t kPage = 4096;
std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::string_view to_string(OpKind kind) {
  switch (kind) {
    case OpKind::kNone: return "nothing";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kBroadcast: return "broadcast";
  }
  return "an unknown operation";
}

std::string Signature::to_string() const {
  std::string text(coll::to_string(op));
  if (op == OpKind::kBarrier) return text + "()";
  text += concat("(", count, " x ", coll::to_string(type));
  if (op == OpKind::kAllReduce) text += concat(", ", coll::to_string(reduce));
  if (op == OpKind::kBroadcast) text += concat(", root ", root);
  if (tag != 0) text += concat(", tag ", std::hex, tag);
  return text + ")";
}

Layout::Layout(int ranks) : ranks_(ranks) {
  const auto others = static_cast<std::size_t>(std::max(1, ranks - 1));
  eager_ = ranks <= 8 ? std::size_t{128} << 10 : std::size_t{16} << 10;
  // A staging buffer holds one slice for every other rank and stays in a core's second-level cache.
  constexpr std::size_t kStage = std::size_t{256} << 10;
  slice_ = std::max(kPage, kStage / others / kPage * kPage);
  stage_ = pages(slice_ * others);
}

std::size_t Layout::heads_end() const {
  return pages(sizeof(GroupHead) + sizeof(RankHead) * static_cast<std::size_t>(ranks_));
}

std::size_t Layout::total_bytes() const {
  return heads_end() + rank_bytes() * static_cast<std::size_t>(ranks_);
}

GroupHead& Layout::group(std::byte* base) const { return *reinterpret_cast<GroupHead*>(base); }

RankHead& Layout::rank(std::byte* base, int rank) const {
  return reinterpret_cast<RankHead*>(base + sizeof(GroupHead))[rank];
}

std::byte* Layout::data(std::byte* base, int rank) const {
  return base + heads_end() + rank_bytes() * static_cast<std::size_t>(rank);
}

std::byte* Layout::payload(std::byte* base, int rank, std::uint64_t number) const {
  return data(base, rank) + (number & 1) * eager_;
}

std::byte* Layout::stage(std::byte* base, int rank, std::uint64_t round) const {
  return data(base, rank) + 2 * eager_ + (round & 1) * stage_;
}

std::byte* Layout::result(std::byte* base, int rank, std::uint64_t round) const {
  return data(base, rank) + 2 * (eager_ + stage_) + (round & 1) * slice_;
}

}  // namespace convoy::coll
