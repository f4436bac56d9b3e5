#include "autograd/nodes.h"

#include <ATen/Functions.h>

#include <utility>

#include "autograd/pass.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local Pass* pass_here = nullptr;

Pass& current_pass() {
  if (!pass_here || !pass_here->is_current_task()) {
    fail(ErrorKind::kInvalidArgument,
         "autograd: this graph leads to another worker: use backward() of the "
         "convoy::autograd::Context in which its calls were made");
  }
  return *pass_here;
}

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

PassScope::PassScope(Pass& pass) : before_(std::exchange(pass_here, &pass)) {}
PassScope::~PassScope() { pass_here = before_; }

// The highest number: gradients leave as early as they can.
RecvNode::RecvNode(WorkerId sender, std::uint64_t message)
    : Node(/*sequence_nr=*/UINT64_MAX, end_edge()), sender_(sender), message_(message) {}

variable_list RecvNode::apply(variable_list&& gradients) {
  Pass& pass = current_pass();
  if (pass.fast()) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) gradients[i] = input_metadata(i).zeros_like();
    }
  }
  pass.send_back(*this, std::move(gradients));
  return {at::Tensor()};
}

GateNode::GateNode(edge_list&& edges) : Node(/*sequence_nr=*/0, std::move(edges)) {
  add_input_metadata(nothing());
}

variable_list GateNode::apply(variable_list&&) {
  Pass::Arrived arrived = current_pass().next_gradient();
  edge_list edges = arrived.send->sent->edges;
  for (std::size_t i = 0; i < edges.size(); ++i) {
    if (arrived.send->tensors[i]) continue;
    edges[i] = {};
    arrived.gradients[i].reset();
  }
  next_edges() = std::move(edges);
  return std::move(arrived.gradients);
}

EntryNode::EntryNode() : Node(/*sequence_nr=*/UINT64_MAX, end_edge()) {
  add_input_metadata(nothing());
}

variable_list EntryNode::apply(variable_list&&) {
  if (!pass_here) fail(ErrorKind::kInternal, "autograd: the engine runs a pass on another thread");
  pass_here->begin_task();
  return {at::Tensor()};
}

}  // namespace convoy::autograd::detail
