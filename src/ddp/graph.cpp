#include "ddp/graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <exception>

namespace convoy {
namespace {

namespace ag = torch::autograd;
using TaskFuture = c10::intrusive_ptr<at::ivalue::Future>;

// The future of the running backward, where its error will stand. libtorch shows of a GraphTask
// only one member's address; the task around it is believed if it has the right number.
TaskFuture current_future() {
  const auto* member = ag::get_current_graph_task_exec_info();
  if (member == nullptr) return {};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t kOffset = offsetof(ag::GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* task =
      reinterpret_cast<const ag::GraphTask*>(reinterpret_cast<const std::byte*>(member) - kOffset);
  if (task->id_ != static_cast<std::uint64_t>(ag::get_current_graph_task_id())) return {};
  return task->future_result_;
}

// The engine drops its callbacks when a backward fails: this one notices.
class AtEnd {
 public:
  AtEnd(std::function<void()> end, std::function<void(std::string)> failed)
      : end_(std::move(end)), failed_(std::move(failed)), future_(current_future()) {}
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() {
    if (ran_) return;
    std::string cause = "its backward was given up";
    if (future_ && future_->completed() && future_->hasError()) {
      cause = future_->tryRetrieveErrorMessage();
    }
    failed_(std::move(cause));
  }

  void run() {
    ran_ = true;
    end_();
  }

 private:
  const std::function<void()> end_;
  const std::function<void(std::string)> failed_;
  const TaskFuture future_;
  bool ran_ = false;
};

}  // namespace

void Sink::let_go() noexcept {
  if (fate && !visited && std::uncaught_exceptions() > 0) fate->unwound = true;
  fate.reset();
}

void Sink::release_resources() {
  let_go();
  Node::release_resources();
}

ag::variable_list Sink::apply(ag::variable_list&& gradients) {
  if (enter_(*this)) visited = true;
  gradients.resize(num_outputs());  // none, if the output needed no gradient
  return std::move(gradients);
}

at::Tensor put_sink(const at::Tensor& output, const c10::intrusive_ptr<Sink>& sink) {
  return put_sink(output, output, sink);
}

at::Tensor put_sink(const at::Tensor& value, const at::Tensor& history,
                    const c10::intrusive_ptr<Sink>& sink) {
  ag::edge_list next;
  if (history.requires_grad()) next.push_back(ag::impl::gradient_edge(history));
  sink->set_next_edges(std::move(next));
  at::Tensor copy = value.tensor_data();
  ag::set_history(copy, sink);
  return copy;
}

bool is_in_backward(const ag::Node& node) {
  const auto* nodes = ag::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->contains(const_cast<ag::Node*>(&node));
}

std::unordered_set<const ag::Node*> reachable(const std::vector<NodePtr>& roots) {
  std::unordered_set<const ag::Node*> seen;
  std::vector<const ag::Node*> next;
  for (const NodePtr& root : roots) {
    if (seen.insert(root.get()).second) next.push_back(root.get());
  }
  while (!next.empty()) {
    const ag::Node* node = next.back();
    next.pop_back();
    for (const ag::Edge& edge : node->next_edges()) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) {
        next.push_back(edge.function.get());
      }
    }
  }
  return seen;
}

bool backward_accumulates(const std::vector<NodePtr>& accumulators) {
  const auto* chosen = ag::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  for (const NodePtr& accumulator : accumulators) {
    const auto found = chosen->find(accumulator.get());
    if (found != chosen->end() && found->second.needed_) return true;
  }
  return false;
}

void at_end_of_backward(std::function<void()> end, std::function<void(std::string)> failed) {
  const auto last = std::make_shared<AtEnd>(std::move(end), std::move(failed));
  ag::Engine::get_default_engine().queue_callback([last] { last->run(); });
}

}  // namespace convoy
