#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

// What the reducer asks of libtorch's autograd.
namespace convoy {

using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

// The node between a wrapped forward and whatever comes after it: gradients pass unchanged, and the
// first thing that a backward does below the loss is to come by here. One for each output, so that
// one can be back-propagated without the others.
class Sink final : public torch::autograd::Node {
 public:
  // Called before the gradient goes on; may throw.
  explicit Sink(std::function<void(Sink&)> enter) : enter_(std::move(enter)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ConvoySink"; }

  // True once a backward has come by.
  bool visited = false;

 private:
  const std::function<void(Sink&)> enter_;
};

// The same memory and version counter under a new history: `sink`, and then what made `output`. An
// output that needs no gradient gets one that ends in the sink.
at::Tensor put_sink(const at::Tensor& output, const c10::intrusive_ptr<Sink>& sink);

// All nodes that a backward from these ones can reach.
std::unordered_set<const torch::autograd::Node*> reachable(const std::vector<NodePtr>& roots);

// In a backward: false if it computes only gradients of chosen tensors, none of which is the leaf
// of one of these accumulators.
bool backward_accumulates(const std::vector<NodePtr>& accumulators);

// In a backward: calls `end` when the running graph task has come to its end, from where an
// exception of it leaves backward(); or `failed` with the cause if it never gets there. That must
// not throw.
void at_end_of_backward(std::function<void()> end, std::function<void(std::string)> failed);

}  // namespace convoy
