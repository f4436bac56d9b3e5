#include "autograd/nodes.h"

#include <ATen/Functions.h>

#include <utility>

#include "autograd/gated.h"

namespace convoy::autograd::detail {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

class EndNode final : public Node {
 public:
  EndNode() : Node(/*sequence_nr=*/0) { add_input_metadata(undefined_input{}); }
  variable_list apply(variable_list&&) override { return {}; }
  std::string name() const override { return "convoy::End"; }
};

edge_list end_edge() { return {torch::autograd::Edge(end_node(), 0)}; }

}  // namespace

const c10::intrusive_ptr<Node>& end_node() {
  static const auto* const node = new c10::intrusive_ptr<Node>(c10::make_intrusive<EndNode>());
  return *node;
}

const at::Tensor& nothing() {
  static const auto* const tensor = new at::Tensor(at::zeros({}));
  return *tensor;
}

// The highest number: gradients leave as early as they can.
RecvNode::RecvNode(Received&& received)
    : Node(/*sequence_nr=*/UINT64_MAX, end_edge()), received_(std::move(received)) {}

variable_list RecvNode::apply(variable_list&& gradients) {
  GatedRun::Host& host = GatedRun::current().host();
  if (host.sends_zeros()) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) gradients[i] = input_metadata(i).zeros_like();
    }
  }
  host.send_back(received_, std::move(gradients));
  return {at::Tensor()};
}

GateNode::GateNode(edge_list&& edges, std::uint64_t sequence_nr, std::uint64_t message)
    : Node(sequence_nr, std::move(edges)), message_(message) {
  add_input_metadata(undefined_input{});
}

variable_list GateNode::apply(variable_list&&) {
  auto [edges, gradients] = GatedRun::take(GatedRun::current().host().next_gradient(message_));
  next_edges() = std::move(edges);
  return std::move(gradients);
}

EntryNode::EntryNode(edge_list&& edges, variable_list&& gradients)
    : Node(/*sequence_nr=*/UINT64_MAX, std::move(edges)), gradients_(std::move(gradients)) {
  add_input_metadata(nothing());
}

variable_list EntryNode::apply(variable_list&&) {
  GatedRun::begin_current();
  return std::move(gradients_);
}

}  // namespace convoy::autograd::detail
