#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <typeinfo>
#include <utility>

#include "autograd/walk.h"

// The nodes that stand for other workers in a graph of libtorch's.
namespace convoy::autograd::detail {

// Behind every recv node, and behind the first node of a run that leads to nothing else. One for
// the process.
const c10::intrusive_ptr<torch::autograd::Node>& end_node();

// Where tensors of a message come from: its gradients go back to the sender.
class RecvNode final : public torch::autograd::Node {
 public:
  explicit RecvNode(Received&& received);

  const Received& received() const { return received_; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "convoy::RecvBackward"; }

 private:
  const Received received_;
};

// nullptr: it is another one. The class is this library's own: it has one type_info.
inline const RecvNode* as_recv(const torch::autograd::Node& node) {
  return &typeid(node) == &typeid(RecvNode) ? static_cast<const RecvNode*>(&node) : nullptr;
}

// Lets the gradients of one message in. The engine takes it when nothing else is ready: it then
// waits until the gradients of any message have come that the pass expects. There are as many gates
// as messages, and together they have the edges of all of them, so that the engine counts right
// whatever order they come in. With a number of its own it waits for its own message, in its place
// among the nodes.
class GateNode final : public torch::autograd::Node {
 public:
  GateNode(torch::autograd::edge_list&& edges, std::uint64_t sequence_nr, std::uint64_t message);
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
  std::string name() const override { return "convoy::Gate"; }

 private:
  const std::uint64_t message_;  // 0: any
};

// The root of a run: tells the engine what to do with what arrives at leaves, and gives each of its
// edges a gradient.
class EntryNode final : public torch::autograd::Node {
 public:
  EntryNode(torch::autograd::edge_list&& edges, torch::autograd::variable_list&& gradients);
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
  std::string name() const override { return "convoy::Entry"; }

 private:
  torch::autograd::variable_list gradients_;
};

// What an entry is fed with.
const at::Tensor& nothing();

}  // namespace convoy::autograd::detail
