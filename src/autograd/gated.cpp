#include "autograd/gated.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>
#include <unordered_map>
#include <utility>

#include "autograd/nodes.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;
using Capture = ag::GraphTask::ExecInfo::Capture;
using CaptureHook = Capture::GradCaptureHook;
using ExecInfos = std::unordered_map<ag::Node*, ag::GraphTask::ExecInfo>;

thread_local GatedRun* run_here = nullptr;

ExecInfos& exec_infos() { return const_cast<ExecInfos&>(*ag::get_current_graph_task_exec_info()); }

// What happens to a gradient that has arrived at a leaf.
class LeafHook final : public CaptureHook {
 public:
  LeafHook(ag::AccumulateGrad& leaf, GatedRun::Host& host) : leaf_(leaf), host_(host) {}

  at::Tensor operator()(const at::Tensor& gradient) override {
    ag::variable_list gradients{gradient};
    for (const auto& hook : leaf_.pre_hooks()) gradients = (*hook)(gradients);
    if (gradients.at(0).defined()) host_.arrived_at(leaf_, gradients[0]);
    for (const auto& hook : leaf_.post_hooks()) (*hook)({}, gradients);
    return {};
  }

 private:
  ag::AccumulateGrad& leaf_;
  GatedRun::Host& host_;
};

}  // namespace

// The gradients of a message whose node is not run.
struct GatedRun::Parcel {
  const Received& received;
  Host& host;
  ag::variable_list gradients;
  std::size_t missing = 0;

  class Hook final : public CaptureHook {
   public:
    Hook(std::shared_ptr<Parcel> parcel, std::size_t place)
        : parcel_(std::move(parcel)), place_(place) {}

    at::Tensor operator()(const at::Tensor& gradient) override {
      parcel_->gradients[place_] = gradient;
      if (--parcel_->missing == 0) {
        parcel_->host.send_back(parcel_->received, std::move(parcel_->gradients));
      }
      return {};
    }

   private:
    const std::shared_ptr<Parcel> parcel_;
    const std::size_t place_;
  };
};

// Tells a run of each node, on this thread.
class GatedRun::Watch {
 public:
  explicit Watch(GatedRun& run) : before_(std::exchange(run_here, &run)) {
    at::RecordFunctionCallback callback(&before, &after);
    callback.scopes({at::RecordScope::BACKWARD_FUNCTION});
    handle_ = at::addThreadLocalCallback(callback);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    at::removeCallback(handle_);
    run_here = before_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
    if (run_here) run_here->before_node(function.name());
    return nullptr;
  }
  static void after(const at::RecordFunction&, at::ObserverContext*) {
    if (run_here) run_here->after_node();
  }

  GatedRun* const before_;
  at::CallbackHandle handle_ = 0;
};

GatedRun::GatedRun(Host& host, const Walk& walk, std::size_t first_leaf)
    : host_(host),
      leaves_(walk.leaves().begin() + static_cast<std::ptrdiff_t>(first_leaf),
              walk.leaves().end()) {
  for (const auto& [node, reached] : walk.reached()) {
    if (!as_recv(*node)) captured_.push_back(reached);
  }
}

void GatedRun::add_gates(const Walk& walk) { add_gates(walk, nullptr); }

void GatedRun::add_gates(const Walk& walk,
                         const std::function<std::uint64_t(const SentMessage&)>& sequence_nr) {
  for (const auto& [message, send] : walk.sends()) {
    ag::edge_list edges = send.sent->edges;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (!send.tensors[i]) edges[i] = {};
    }
    edges_.emplace_back(
        c10::make_intrusive<GateNode>(std::move(edges), sequence_nr ? sequence_nr(*send.sent) : 0,
                                      sequence_nr ? message : 0),
        0);
    inputs_.push_back(nothing());
  }
}

GatedRun& GatedRun::current() {
  if (!run_here || !run_here->is_current_task()) {
    fail(ErrorKind::kInvalidArgument,
         "autograd: this graph leads to another worker: use backward() of the "
         "convoy::autograd::Context in which its calls were made");
  }
  return *run_here;
}

void GatedRun::run(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients,
                   bool retain) {
  ag::edge_list edges{ag::Edge(c10::make_intrusive<EntryNode>(), 0)};
  ag::variable_list inputs{nothing()};
  ag::edge_list outputs{ag::Edge(end_node(), 0)};
  edges.reserve(1 + roots.size() + edges_.size());
  inputs.reserve(1 + roots.size() + edges_.size());
  outputs.reserve(1 + leaves_.size());
  edges.insert(edges.end(), roots.begin(), roots.end());
  inputs.insert(inputs.end(), std::make_move_iterator(gradients.begin()),
                std::make_move_iterator(gradients.end()));
  edges.insert(edges.end(), std::make_move_iterator(edges_.begin()),
               std::make_move_iterator(edges_.end()));
  inputs.insert(inputs.end(), inputs_.begin(), inputs_.end());
  edges_.clear();
  for (const auto& leaf : leaves_) outputs.emplace_back(leaf, 0);
  for (const auto& each : captured_) {
    for (std::size_t i = 0; i < each.tensors.size(); ++i) {
      if (each.tensors[i]) outputs.emplace_back(each.node, static_cast<std::uint32_t>(i));
    }
  }
  const Watch watch(*this);
  ag::Engine::get_default_engine().execute(edges, inputs, retain, /*create_graph=*/false,
                                           /*accumulate_grad=*/false, outputs);
}

bool GatedRun::is_current_task() const { return ag::get_current_graph_task_id() == task_; }

void GatedRun::begin_current() {
  if (!run_here) fail(ErrorKind::kInternal, "autograd: the engine runs a pass on another thread");
  run_here->begin();
}

void GatedRun::begin() {
  task_ = ag::get_current_graph_task_id();
  ExecInfos& infos = exec_infos();
  for (const auto& node : leaves_) {
    ag::GraphTask::ExecInfo& info = infos.at(node.get());
    auto* const leaf = dynamic_cast<ag::AccumulateGrad*>(node.get());
    if (leaf && !host_.engine_accumulates(*leaf)) {
      info.captures_->at(0).DO_NOT_USE_DEPRECATED_register_capture_hook(
          std::make_unique<LeafHook>(*leaf, host_));
      continue;
    }
    // It leads nowhere, but is run as in any backward pass.
    if (leaf) info.captures_.reset();
    info.needed_ = true;
  }
  for (const auto& each : captured_) {
    const auto parcel = std::make_shared<Parcel>(
        Parcel{*each.received, host_, ag::variable_list(each.tensors.size())});
    for (auto& capture : *infos.at(each.node.get()).captures_) {
      ++parcel->missing;
      capture.DO_NOT_USE_DEPRECATED_register_capture_hook(
          std::make_unique<Parcel::Hook>(parcel, static_cast<std::size_t>(capture.input_idx_)));
    }
  }
}

void GatedRun::before_node(const char* name) {
  if (is_current_task()) host_.before_node(name);
}

void GatedRun::after_node() {
  if (!is_current_task() || host_.after_node()) return;
  // The engine passes over all that is left.
  for (auto& [node, info] : exec_infos()) {
    info.needed_ = false;
    info.captures_.reset();
  }
}

}  // namespace convoy::autograd::detail
