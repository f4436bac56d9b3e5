#include "coll/movement.h"

namespace convoy::coll {

std::size_t Movement::sent(int source, int target) const {
  switch (kind_) {
    case OpKind::kBroadcast:
    case OpKind::kScatter: return is_root(source) ? part() : 0;
    case OpKind::kGather: return is_root(target) ? part() : 0;
    case OpKind::kAllGather:
    case OpKind::kAllToAll: return part();
    default: return table_bytes(source, target);
  }
}

std::size_t Movement::contribution(int source) const {
  if (multicast()) return sent(source, 0);
  if (kind_ == OpKind::kGather || kind_ == OpKind::kGatherV) {
    return is_root(source) ? 0 : sent(source, static_cast<int>(call_.signature.root));
  }
  return offset(source, size_);
}

// Inputs hold every rank's part in order, the own one included.
std::size_t Movement::offset(int source, int target) const {
  const bool personal = kind_ == OpKind::kScatter || kind_ == OpKind::kAllToAll ||
                        kind_ == OpKind::kScatterV || kind_ == OpKind::kAllToAllV;
  if (!personal) return 0;
  if (!has_table(kind_)) return static_cast<std::size_t>(target) * sent(source, 0);
  std::size_t begin = 0;
  for (int r = 0; r < target; ++r) begin += table_bytes(source, r);
  return begin;
}

View Movement::outgoing(int target) const {
  const auto at = static_cast<std::size_t>(target);
  const std::size_t bytes = sent(rank_, target);
  const auto* lists = call_.lists.get();
  if (lists && !lists->input.empty()) {
    // Coalesced inputs go to everyone; other lists have one stretch a rank.
    if (multicast()) return View(lists->input);
    return {lists->input[at].data, bytes};
  }
  return {const_cast<std::byte*>(call_.input) + offset(rank_, target), bytes};
}

View Movement::incoming(int source) const {
  const auto at = static_cast<std::size_t>(source);
  const std::size_t bytes = sent(source, rank_);
  const auto* lists = call_.lists.get();
  if (lists && !lists->output.empty()) {
    if (kind_ == OpKind::kBroadcast) return View(lists->output);
    const std::size_t each = lists->output.size() / static_cast<std::size_t>(size_);
    return View(std::span(lists->output).subspan(at * each, each));
  }
  const bool from_all =
      kind_ == OpKind::kAllGather || kind_ == OpKind::kGather || kind_ == OpKind::kAllToAll;
  return {call_.output + (from_all ? at * bytes : 0), bytes};
}

}  // namespace convoy::coll
