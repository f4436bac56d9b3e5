#include "autograd/frames.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// Numbers of a thread are far below; those that are given here are not.
constexpr std::uint64_t kFirstLabel = std::uint64_t{1} << 41;
constexpr std::uint64_t kLastLabel = INT64_MAX;
// New labels lie near the one before them: whoever makes calls goes on behind it. Each takes this
// part of the room that is left, so that many find some, and others between those.
constexpr std::uint64_t kParts = 256;
constexpr std::uint64_t kPartsAtEnd = std::uint64_t{1} << 16;
// Room for the nodes of a place, at least.
constexpr std::uint64_t kLeastDistance = std::uint64_t{1} << 20;
// What no mark is for was made before all that has one.
constexpr std::uint64_t kLeastLabel = std::uint64_t{1} << 40;
// A place has more nodes than room.
constexpr std::uint64_t kNoRoom = UINT64_MAX - 1;

[[noreturn]] void fail_order(const char* why) {
  fail(ErrorKind::kUnsupported,
       "autograd: this graph has no order that is the same in every run: ", why);
}

}  // namespace

FrameMark mark_here(std::shared_ptr<const FramePlace> place, std::uint32_t element) {
  // A thread's first node must not have number 0, which is the gates'.
  if (at::sequence_number::peek() == 0) at::sequence_number::get_and_increment();
  return {std::move(place), element, at::RecordFunction::currentThreadId(),
          at::sequence_number::peek()};
}

FrameOrder::Key FrameOrder::key_of(const FramePlace& place, std::uint32_t element) {
  if (place.too_deep) fail_order("calls are nested too deep");
  Key key = place.path;
  key.push_back(element);
  return key;
}

std::vector<FrameOrder::Key> FrameOrder::keys_of(const Walk& walk, std::size_t first_mark) const {
  std::vector<Key> keys;
  for (std::size_t i = first_mark; i < marks_.size(); ++i) {
    keys.push_back(key_of(*marks_[i].place, marks_[i].element));
  }
  for (const auto& [message, send] : walk.sends()) {
    if (!send.sent->place) fail_order("a message was not sent by a call");
    keys.push_back(key_of(*send.sent->place, send.sent->element));
    if (!send.sent->reply) keys.back().push_back(0);
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

// Each key its number, between those of its neighbours, so that later ones find room, too.
bool FrameOrder::label(const std::vector<Key>& keys) {
  for (auto first = keys.begin(); first != keys.end();) {
    const auto after = labels_.lower_bound(*first);
    const bool at_end = after == labels_.end();
    if (!at_end && after->first == *first) {
      ++first;
      continue;
    }
    const auto last = std::find_if(
        first, keys.end(), [&](const Key& key) { return !at_end && !(key < after->first); });
    std::uint64_t number = kFirstLabel;
    if (after != labels_.begin()) {
      const Label& before = std::prev(after)->second;
      number = before.number + before.nodes;
    }
    const std::uint64_t room = (at_end ? kLastLabel : after->second.number) - number;
    const auto count = static_cast<std::uint64_t>(last - first);
    const std::uint64_t step = room / (count + (at_end ? kPartsAtEnd : kParts));
    if (step < kLeastDistance) return false;
    for (; first != last; ++first) {
      labels_.emplace_hint(after, *first, Label{number += step});
    }
  }
  return true;
}

void FrameOrder::label_anew(const Walk& walk) {
  labels_.clear();
  threads_.clear();
  labelled_ = 0;
  ++generation_;
  if (!label(keys_of(walk, 0))) fail_order("there are too many calls");
}

// Of a node that a thread made when it was at this number.
std::uint64_t FrameOrder::number_at(std::uint64_t thread, std::uint64_t made) {
  const auto pieces = threads_.find(thread);
  if (pieces == threads_.end()) return kLeastLabel + made;
  const auto next = pieces->second.upper_bound(made);
  if (next == pieces->second.begin()) return kLeastLabel + made;
  const Piece& piece = std::prev(next)->second;
  Label& label = piece.label->second;
  const std::uint64_t behind = 1 + (made - piece.first);
  const auto after = std::next(piece.label);
  const std::uint64_t end = after == labels_.end() ? kLastLabel : after->second.number;
  if (behind >= end - label.number) return kNoRoom;
  label.nodes = std::max(label.nodes, behind);
  return label.number + behind;
}

std::uint64_t FrameOrder::number_of_node(const Node& node) {
  std::uint64_t number = node.sequence_nr();
  const auto known = numbered_.find(&node);
  if (known != numbered_.end() && known->second.given == number) {
    if (known->second.generation == generation_) return number;
    number = known->second.made;
  }
  // Otherwise another context has numbered it.
  return number < kLeastLabel ? number_at(node.thread_id(), number) : number;
}

std::uint64_t FrameOrder::number_of(const SentMessage& sent) const {
  Key key = key_of(*sent.place, sent.element);
  // Before all that the callee does.
  if (!sent.reply) key.push_back(0);
  return labels_.at(key).number;
}

void FrameOrder::number(const Walk& walk, Others others) {
  if (!label(keys_of(walk, labelled_))) {
    if (others == Others::kRun) {
      fail_order("there are too many calls between others, and other passes run meanwhile");
    }
    label_anew(walk);
  }
  for (; labelled_ < marks_.size(); ++labelled_) {
    const FrameMark& mark = marks_[labelled_];
    threads_[mark.thread].insert_or_assign(
        mark.sequence_nr, Piece{labels_.find(key_of(*mark.place, mark.element)), mark.sequence_nr});
  }

  // Nodes that use others come behind them. A node for which this is not so was made elsewhere,
  // outside of the context: it goes before, if it leads to no other worker.
  struct Use {
    std::size_t count = 0;            // that have not been looked at
    std::uint64_t most = UINT64_MAX;  // it is below this
    bool leads_away = false;
  };
  std::unordered_map<Node*, Use> uses;
  for (Node* const node : walk.nodes()) {
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid()) ++uses[edge.function.get()].count;
    }
  }
  std::vector<Node*> order;
  for (Node* const node : walk.nodes()) {
    if (uses[node].count == 0) order.push_back(node);
  }
  for (const auto& [message, send] : walk.sends()) {
    for (std::size_t i = 0; i < send.sent->edges.size(); ++i) {
      const Edge& edge = send.sent->edges[i];
      if (!send.tensors[i] || !edge.is_valid()) continue;
      auto& most = uses[edge.function.get()].most;
      most = std::min(most, number_of(*send.sent));
    }
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (const Edge& edge : order[i]->next_edges()) {
      if (!edge.is_valid() || --uses[edge.function.get()].count != 0) continue;
      if (walk.nodes().contains(edge.function.get())) order.push_back(edge.function.get());
    }
  }
  for (std::size_t i = order.size(); i-- > 0;) {
    Use& use = uses[order[i]];
    for (const Edge& edge : order[i]->next_edges()) {
      if (!edge.is_valid()) continue;
      use.leads_away = use.leads_away || walk.reached().contains(edge.function.get()) ||
                       uses[edge.function.get()].leads_away;
    }
  }
  for (Node* const node : order) {
    Use& use = uses[node];
    // AccumulateGrad and the like run at once.
    if (node->sequence_nr() == UINT64_MAX) continue;
    const std::uint64_t before = node->sequence_nr();
    std::uint64_t number = number_of_node(*node);
    if (number >= use.most) {
      if (use.leads_away) fail_order("a call used what a later call had computed");
      number = use.most - 1;
    }
    if (number == kNoRoom) fail_order("there are too many operations between two calls");
    if (before != number) {
      Numbered& numbered = numbered_[node];
      // Its own number, if it had one of ours.
      if (numbered.given != before) numbered.made = before;
      numbered.given = number;
      numbered.generation = generation_;
      node->set_sequence_nr(number);
    }
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      auto& most = uses[edge.function.get()].most;
      most = std::min(most, number);
    }
  }
}

void FrameOrder::clear() {
  marks_.clear();
  labels_.clear();
  threads_.clear();
  labelled_ = 0;
  numbered_.clear();
}

}  // namespace convoy::autograd::detail
