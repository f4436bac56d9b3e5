#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>

#include "autograd/wire.h"

// The nodes that stand for other workers in a graph of libtorch's.
namespace convoy::autograd::detail {

class Pass;

// Behind every recv node, and behind the first node of a pass: something that is wanted, so that
// the engine runs what leads to it. One for the process.
const c10::intrusive_ptr<torch::autograd::Node>& end_node();

// Where tensors of a message come from: its gradients go back to the sender.
class RecvNode final : public torch::autograd::Node {
 public:
  RecvNode(WorkerId sender, std::uint64_t message);

  WorkerId sender() const { return sender_; }
  std::uint64_t message() const { return message_; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "convoy::RecvBackward"; }

 private:
  const WorkerId sender_;
  const std::uint64_t message_;
};

// Lets the gradients of one message in. The engine takes it when nothing else is ready: it then
// waits until the gradients of any message have come that the pass expects. There are as many gates
// as messages, and together they have the edges of all of them, so that the engine counts right
// whatever order they come in.
class GateNode final : public torch::autograd::Node {
 public:
  explicit GateNode(torch::autograd::edge_list&& edges);
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
  std::string name() const override { return "convoy::Gate"; }
};

// Runs before all others: tells the engine what to do with what arrives at leaves.
class EntryNode final : public torch::autograd::Node {
 public:
  EntryNode();
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
  std::string name() const override { return "convoy::Entry"; }
};

// What gates and entries are fed with.
const at::Tensor& nothing();

// The pass whose nodes this thread runs.
class PassScope {
 public:
  explicit PassScope(Pass& pass);
  PassScope(const PassScope&) = delete;
  PassScope& operator=(const PassScope&) = delete;
  ~PassScope();

 private:
  Pass* const before_;
};

}  // namespace convoy::autograd::detail
