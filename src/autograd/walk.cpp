#include "autograd/walk.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <bit>
#include <mutex>

#include "autograd/nodes.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// How much is looked at to find out whether parts are apart.
constexpr std::size_t kMostApartSends = 64;
constexpr std::size_t kMostApartNodes = 1024;

// Passes that run at once may share nodes.
std::mutex& sequence_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

[[noreturn]] void fail_elsewhere(const Origin& came, const Origin& pass) {
  const bool in_session = came.session == pass.session;
  fail(ErrorKind::kInvalidArgument, "autograd: the graph leads to a tensor that was received in ",
       in_session ? concat("context ", came.context) : std::string("a context of another session"),
       ", and the backward pass is of context ", pass.context,
       ": use the context in which its calls were made, or detach() it");
}

class OwnReceivedNodes final : public ReceivedNodes {
 public:
  const Received* find(const Node& node) const override {
    const RecvNode* const recv = as_recv(node);
    return recv ? &recv->received() : nullptr;
  }
};

}  // namespace

const ReceivedNodes& own_received_nodes() {
  static const OwnReceivedNodes nodes;
  return nodes;
}

void Walk::push(const Edge& edge) {
  if (!edge.is_valid()) return;
  Node* const node = edge.function.get();
  const Received* const received = received_.find(*node);
  if (!received) {
    if (visited_.insert(node).second) stack_.push_back(node);
    return;
  }
  if (received->origin != origin_) fail_elsewhere(received->origin, origin_);
  Reached& reached = reached_[node];
  if (!reached.received) {
    reached.received = received;
    reached.node = edge.function;
  }
  auto& tensors = reached.tensors;
  tensors.resize(std::max<std::size_t>(node->num_inputs(), tensors.size()));
  if (tensors.at(edge.input_nr)) return;
  tensors[edge.input_nr] = true;
  ++ports_;
  Ports& ports = new_[received->message];
  ports.sender = received->sender;
  ports.message = received->message;
  ports.tensors.push_back(edge.input_nr);
}

void Walk::run() {
  while (!stack_.empty()) {
    Node* const node = stack_.back();
    stack_.pop_back();
    // A thread's first node is number 0, and gates must come after it.
    if (node->sequence_nr() == 0) {
      const std::scoped_lock lock(sequence_mutex());
      if (node->sequence_nr() == 0) node->set_sequence_nr(1);
    }
    bool leads_on = false;
    for (const Edge& edge : node->next_edges()) {
      leads_on = leads_on || edge.is_valid();
      push(edge);
    }
    if (!leads_on) leaves_.push_back(node->getptr());
  }
}

void Walk::follow(const std::vector<Edge>& edges) {
  for (const Edge& edge : edges) push(edge);
  run();
}

void Walk::follow(const std::shared_ptr<const SentMessage>& sent,
                  const std::vector<std::uint32_t>& tensors) {
  ActiveSend& active = sends_[sent->message];
  active.sent = sent;
  active.tensors.resize(sent->edges.size());
  for (const std::uint32_t tensor : tensors) {
    if (tensor >= active.tensors.size()) {
      fail(ErrorKind::kInvalidArgument, "autograd: message ", sent->message, " has ",
           active.tensors.size(), " tensors that require grad; number ", tensor,
           " is none of them");
    }
    if (active.tensors[tensor]) continue;
    active.tensors[tensor] = true;
    push(sent->edges[tensor]);
  }
  run();
}

void Walk::follow(const std::shared_ptr<const SentMessage>& sent, std::uint32_t tensors) {
  std::vector<std::uint32_t> list;
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((tensors & bit(i)) != 0) list.push_back(i);
  }
  follow(sent, list);
}

void Walk::follow_all(const std::shared_ptr<const SentMessage>& sent) {
  std::vector<std::uint32_t> all(sent->edges.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint32_t>(i);
  follow(sent, all);
}

std::vector<Ports> Walk::take_reached() {
  std::vector<Ports> result;
  result.reserve(new_.size());
  for (auto& [message, ports] : new_) result.push_back(std::move(ports));
  new_.clear();
  return result;
}

std::optional<Plan> Walk::plan(WorkerId self) const {
  struct Pair {
    WorkerId sender = 0;
    WorkerId receiver = 0;
    std::uint32_t tensors = 0;
  };
  std::map<std::uint64_t, Pair> pairs;
  const auto add = [&pairs](const Upstream& one) {
    Pair& pair = pairs[one.message];
    pair.sender = one.sender;
    pair.receiver = one.receiver;
    pair.tensors |= one.tensors;
  };
  for (const auto& [node, reached] : reached_) {
    const Received& received = *reached.received;
    if (!received.lineage.complete || reached.tensors.size() > Lineage::kMostTensors) {
      return std::nullopt;
    }
    std::uint32_t tensors = 0;
    for (std::uint32_t i = 0; i < reached.tensors.size(); ++i) {
      if (reached.tensors[i]) tensors |= bit(i);
    }
    add({received.message, received.sender, self, tensors, 0});
    for (const Upstream& each : received.lineage.all) {
      if ((each.of & tensors) != 0) add(each);
    }
  }
  Plan plan;
  for (const auto& [message, pair] : pairs) {
    plan[pair.sender].sends.push_back({message, pair.tensors});
    plan[pair.receiver].ports += static_cast<std::uint32_t>(std::popcount(pair.tensors));
    if (pair.receiver == self) plan[pair.sender].from_root = true;
  }
  return plan;
}

bool Walk::is_apart_from(const std::vector<std::shared_ptr<const SentMessage>>& sends) const {
  if (sends.size() > kMostApartSends) return false;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> stack;
  const auto is_shared = [&](const Edge& edge) {
    if (!edge.is_valid()) return false;
    Node* const node = edge.function.get();
    if (visited_.contains(node) || reached_.contains(node)) return true;
    if (!received_.find(*node) && seen.insert(node).second) stack.push_back(node);
    return false;
  };
  for (const auto& sent : sends) {
    for (const Edge& edge : sent->edges) {
      if (is_shared(edge)) return false;
    }
    while (!stack.empty()) {
      const Node* const node = stack.back();
      stack.pop_back();
      if (seen.size() > kMostApartNodes) return false;
      for (const Edge& edge : node->next_edges()) {
        if (is_shared(edge)) return false;
      }
    }
  }
  return true;
}

}  // namespace convoy::autograd::detail
