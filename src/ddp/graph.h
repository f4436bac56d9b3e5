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

// What became of the outputs of one forward. Shared by its sinks.
struct ForwardFate {
  bool paused = false;   // it was made inside of no_sync(): only a backward outside counts it
  bool unwound = false;  // an exception took an output that no backward had come to
};

// The node between a wrapped forward and whatever comes after it: gradients pass unchanged, and the
// first thing that a backward does below the loss is to come by here. One for each output, so that
// one can be back-propagated without the others.
class Sink final : public torch::autograd::Node {
 public:
  // `enter` is called before the gradient goes on; it may throw, and tells whether this backward
  // adds to gradients of parameters. `forward` is the number of the forward that it belongs to.
  Sink(std::uint64_t forward_number, std::shared_ptr<ForwardFate> fate_of_forward,
       std::function<bool(Sink&)> enter)
      : forward(forward_number), fate(std::move(fate_of_forward)), enter_(std::move(enter)) {}
  ~Sink() override { let_go(); }
  void release_resources() override;  // when only weak references are left

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ConvoySink"; }

  const std::uint64_t forward;
  std::shared_ptr<ForwardFate> fate;  // none: of no forward
  bool visited = false;               // by a backward that adds to gradients

 private:
  void let_go() noexcept;

  const std::function<bool(Sink&)> enter_;
};

// The same memory and version counter under a new history: `sink`, and then what made `output`. An
// output that needs no gradient gets one that ends in the sink.
at::Tensor put_sink(const at::Tensor& output, const c10::intrusive_ptr<Sink>& sink);

// A value of its own, with the history of another tensor behind the sink.
at::Tensor put_sink(const at::Tensor& value, const at::Tensor& history,
                    const c10::intrusive_ptr<Sink>& sink);

// True if the running backward will come by this node.
bool is_in_backward(const torch::autograd::Node& node);

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
