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
    case OpKind::kMonitoredBarrier: return "monitored_barrier";
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kReduce: return "reduce";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kReduceScatterV: return "reduce_scatter_v";
    case OpKind::kAllGatherV: return "all_gather_v";
    case OpKind::kGatherV: return "gather_v";
    case OpKind::kScatterV: return "scatter_v";
    case OpKind::kAllToAllV: return "all_to_all_v";
  }
  return "an unknown operation";
}

bool has_root(OpKind op) {
  return op == OpKind::kReduce || op == OpKind::kBroadcast || op == OpKind::kGather ||
         op == OpKind::kScatter || op == OpKind::kGatherV || op == OpKind::kScatterV;
}

namespace {

bool reduces(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceScatterV;
}

}  // namespace

std::string Signature::to_string() const {
  std::string text(coll::to_string(op));
  if (op == OpKind::kBarrier || op == OpKind::kMonitoredBarrier) {
    return text + (tag != 0 ? concat("(tag ", tag, ")") : "()");
  }
  text += '(';
  if (!has_table(op)) text += concat(count, " x ");
  text += coll::to_string(type);
  if (pieces > 1) text += concat(" in ", pieces, " pieces");
  if (reduces(op)) text += concat(", ", coll::to_string(reduce));
  if (rounding != Rounding::kNone) text += concat(", rounded to ", coll::to_string(rounding));
  if (has_root(op)) text += concat(", root ", root);
  if (tag != 0 && (tag & kHashed) == 0) text += concat(", tag ", tag);
  return text + ")";
}

bool Letter::is_sound(const Header& header, std::size_t beside) {
  if (static_cast<int>(header.type) >= kDataTypes) return false;
  switch (header.kind) {
    case Kind::kInline: return header.bytes <= kBodyBytes;
    case Kind::kPayload: return header.bytes <= beside;
    case Kind::kShared:
    case Kind::kBounce: return header.bytes != 0 && header.bytes <= SIZE_MAX / 2;
    case Kind::kAnswer:
    case Kind::kRefusal: return true;
  }
  return false;  // it came from another process
}

Layout::Layout(int ranks) : ranks_(ranks) {
  const auto others = static_cast<std::size_t>(std::max(1, ranks - 1));
  eager_ = ranks <= 8 ? std::size_t{128} << 10 : std::size_t{16} << 10;
  letter_ = ranks <= 8 ? 4096 : ranks <= 16 ? 1024 : 0;
  // A staging buffer holds one slice for every other rank and stays in a core's second-level cache.
  constexpr std::size_t kStage = std::size_t{256} << 10;
  slice_ = std::max(kPage, kStage / others / kPage * kPage);
  stage_ = pages(slice_ * others);
}

std::size_t Layout::channels_at() const {
  return sizeof(GroupHead) + sizeof(RankHead) * static_cast<std::size_t>(ranks_);
}

std::size_t Layout::heads_end() const {
  const auto n = static_cast<std::size_t>(ranks_);
  return pages(channels_at() + n * n * sizeof(Channel));
}

std::size_t Layout::total_bytes() const {
  const auto n = static_cast<std::size_t>(ranks_);
  return heads_end() + rank_bytes() * n + pages(n * n * Channel::kLetters * letter_);
}

Channel& Layout::channel(std::byte* base, int from, int to) const {
  return reinterpret_cast<Channel*>(base + channels_at())[from * ranks_ + to];
}

std::byte* Layout::letter_payload(std::byte* base, int from, int to, std::uint64_t number) const {
  const std::size_t pair = static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
                           static_cast<std::size_t>(to);
  return data(base, ranks_) + (pair * Channel::kLetters + number % Channel::kLetters) * letter_;
}

std::byte* Layout::data(std::byte* base, int rank) const {
  return base + heads_end() + rank_bytes() * static_cast<std::size_t>(rank);
}

std::byte* Layout::payload(std::byte* base, int rank, std::uint64_t number) const {
  return data(base, rank) + (number & 1) * eager_;
}

CountTable& Layout::table(std::byte* base, int rank, std::uint64_t number) const {
  std::byte* tables = data(base, rank) + 2 * eager_ + kDepth * (stage_ + slice_);
  return reinterpret_cast<CountTable*>(tables)[number & 1];
}

std::byte* Layout::stage(std::byte* base, int rank, std::uint64_t round) const {
  return data(base, rank) + 2 * eager_ + round % kDepth * stage_;
}

std::byte* Layout::result(std::byte* base, int rank, std::uint64_t round) const {
  return data(base, rank) + 2 * eager_ + kDepth * stage_ + round % kDepth * slice_;
}

}  // namespace convoy::coll
