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
    if (as_recv(*node)) {
      recvs_.push_back(reached.node);
    } else {
      captured_.push_back(reached);
    }
  }
}

void GatedRun::add_gates(const Walk& walk) { add_gates(walk, nullptr); }

void GatedRun::add_gates(const Walk& walk,
                         const std::function<std::uint64_t(const SentMessage&)>& sequence_nr) {
  in_order_ = sequence_nr != nullptr;
  for (const auto& [message, send] : walk.sends()) {
    ag::edge_list edges = send.sent->edges;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      if (!send.tensors[i]) edges[i] = {};
    }
    gates_.push_back({&send, ag::Edge(c10::make_intrusive<GateNode>(
                                          std::move(edges), in_order_ ? sequence_nr(*send.sent) : 0,
                                          in_order_ ? message : 0),
                                      0)});
  }
}

GatedRun::Taken GatedRun::take(Host::Arrived&& arrived) {
  Taken taken{arrived.send->sent->edges, std::move(arrived.gradients)};
  for (std::size_t i = 0; i < taken.edges.size(); ++i) {
    if (arrived.send->tensors[i]) continue;
    taken.edges[i] = {};
    taken.gradients[i].reset();
  }
  return taken;
}

GatedRun& GatedRun::current() {
  if (!run_here || !run_here->is_current_task()) {
    fail(ErrorKind::kInvalidArgument,
         "autograd: this graph leads to another worker: use backward() of the "
         "convoy::autograd::Context in which its calls were made");
  }
  return *run_here;
}

// The engine has one root, which it runs without making one of its own. Where nothing else begins
// the run, the gradients of the first message come in by it, and that message has no gate.
void GatedRun::run(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients,
                   bool retain) {
  Taken entry{{roots.begin(), roots.end()}, {gradients.begin(), gradients.end()}};
  const Walk::ActiveSend* came = nullptr;
  if (roots.empty() && !in_order_ && !gates_.empty()) {
    Host::Arrived first = host_.next_gradient(0);
    came = first.send;
    entry = take(std::move(first));
  }
  for (Gate& gate : gates_) {
    if (gate.send != came) entry.edges.push_back(std::move(gate.edge));
  }
  gates_.clear();
  ag::edge_list outputs;
  outputs.reserve(leaves_.size() + recvs_.size());
  for (const auto& leaf : leaves_) outputs.emplace_back(leaf, 0);
  for (const auto& recv : recvs_) outputs.emplace_back(recv, 0);
  for (const auto& each : captured_) {
    for (std::size_t i = 0; i < each.tensors.size(); ++i) {
      if (each.tensors[i]) outputs.emplace_back(each.node, static_cast<std::uint32_t>(i));
    }
  }
  if (outputs.empty()) {
    entry.edges.emplace_back(end_node(), 0);
    outputs.emplace_back(end_node(), 0);
  }
  entry.gradients.resize(entry.edges.size());
  const ag::edge_list edges{ag::Edge(
      c10::make_intrusive<EntryNode>(std::move(entry.edges), std::move(entry.gradients)), 0)};
  const Watch watch(*this);
  ag::Engine::get_default_engine().execute(edges, {nothing()}, retain, /*create_graph=*/false,
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
  // They are run, not captured.
  for (const auto& recv : recvs_) {
    ag::GraphTask::ExecInfo& info = infos.at(recv.get());
    info.captures_.reset();
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
