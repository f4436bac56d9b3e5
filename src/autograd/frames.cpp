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
constexpr std::uint64_t kDistance = std::uint64_t{1} << 42;
// Between two that are known, new ones lie near the first: whoever makes calls goes on behind it.
// Each takes this part of the room, so that thousands find some, and others between those.
constexpr std::uint64_t kParts = 256;
// Nodes that a place can have.
constexpr std::uint64_t kLeastDistance = std::uint64_t{1} << 20;
// What no mark is for was made before all that has one.
constexpr std::uint64_t kLeastLabel = std::uint64_t{1} << 40;

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

// Each key its number, between those of its neighbours, so that later ones find room, too.
void FrameOrder::label(const std::vector<Key>& keys) {
  for (auto first = keys.begin(); first != keys.end();) {
    const auto after = labels_.lower_bound(*first);
    if (after != labels_.end() && after->first == *first) {
      ++first;
      continue;
    }
    const auto last = std::find_if(first, keys.end(), [&](const Key& key) {
      return after != labels_.end() && !(key < after->first);
    });
    const std::uint64_t below = after == labels_.begin() ? kFirstLabel : std::prev(after)->second;
    const auto count = static_cast<std::uint64_t>(last - first);
    const bool at_end = after == labels_.end();
    if (at_end && count > (INT64_MAX - below) / kDistance) fail_order("there are too many calls");
    const std::uint64_t step = at_end ? kDistance : (after->second - below) / (count + kParts);
    if (step < kLeastDistance) fail_order("there are too many calls");
    for (std::uint64_t number = below; first != last; ++first) {
      labels_.emplace_hint(after, *first, number += step);
    }
  }
}

std::uint64_t FrameOrder::number_of_node(const Node& node) const {
  const auto thread = threads_.find(node.thread_id());
  if (thread == threads_.end()) return kLeastLabel + node.sequence_nr();
  const auto next = thread->second.upper_bound(node.sequence_nr());
  if (next == thread->second.begin()) return kLeastLabel + node.sequence_nr();
  const Piece& piece = std::prev(next)->second;
  return piece.label + 1 + (node.sequence_nr() - piece.first);
}

std::uint64_t FrameOrder::number_of(const SentMessage& sent) const {
  Key key = key_of(*sent.place, sent.element);
  // Before all that the callee does.
  if (!sent.reply) key.push_back(0);
  return labels_.at(key);
}

void FrameOrder::number(const Walk& walk) {
  std::vector<Key> keys;
  for (std::size_t i = labelled_; i < marks_.size(); ++i) {
    keys.push_back(key_of(*marks_[i].place, marks_[i].element));
  }
  for (const auto& [message, send] : walk.sends()) {
    if (!send.sent->place) fail_order("a message was not sent by a call");
    keys.push_back(key_of(*send.sent->place, send.sent->element));
    if (!send.sent->reply) keys.back().push_back(0);
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  label(keys);
  for (; labelled_ < marks_.size(); ++labelled_) {
    const FrameMark& mark = marks_[labelled_];
    threads_[mark.thread][mark.sequence_nr] = {labels_.at(key_of(*mark.place, mark.element)),
                                               mark.sequence_nr};
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
    std::uint64_t number = node->sequence_nr();
    if (number < kLeastLabel) number = number_of_node(*node);
    if (number >= use.most) {
      if (use.leads_away) fail_order("a call used what a later call had computed");
      number = use.most - 1;
    }
    if (node->sequence_nr() != number) node->set_sequence_nr(number);
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
}

}  // namespace convoy::autograd::detail
