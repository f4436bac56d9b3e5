#include "autograd/walk.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "autograd/nodes.h"
#include "base/error.h"

namespace convoy::autograd::detail {

using torch::autograd::Edge;
using torch::autograd::Node;

void Walk::push(const Edge& edge) {
  if (!edge.is_valid()) return;
  Node* const node = edge.function.get();
  if (auto* const recv = dynamic_cast<RecvNode*>(node)) {
    auto& inputs = recvs_[node];
    inputs.resize(std::max<std::size_t>(recv->num_inputs(), inputs.size()));
    if (inputs.at(edge.input_nr)) return;
    inputs[edge.input_nr] = true;
    Ports& ports = reached_[recv->message()];
    ports.sender = recv->sender();
    ports.message = recv->message();
    ports.tensors.push_back(edge.input_nr);
    return;
  }
  if (visited_.insert(node).second) stack_.push_back(node);
}

void Walk::run() {
  while (!stack_.empty()) {
    Node* const node = stack_.back();
    stack_.pop_back();
    // A thread's first node is number 0, and gates must come after it.
    if (node->sequence_nr() == 0) node->set_sequence_nr(1);
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

void Walk::follow_all(const std::shared_ptr<const SentMessage>& sent) {
  std::vector<std::uint32_t> all(sent->edges.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint32_t>(i);
  follow(sent, all);
}

std::vector<Ports> Walk::take_reached() {
  std::vector<Ports> result;
  result.reserve(reached_.size());
  for (auto& [message, ports] : reached_) result.push_back(std::move(ports));
  reached_.clear();
  return result;
}

}  // namespace convoy::autograd::detail
