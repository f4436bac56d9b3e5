#include "convoy/autograd.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd/coordinator.h"
#include "autograd/registry.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd {

using detail::ContextState;
using detail::Registry;

// --- Gradients ---------------------------------------------------------------------------------

Gradients::Gradients(std::vector<Item> items) : items_(std::move(items)) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    places_.emplace(items_[i].first.unsafeGetTensorImpl(), i);
  }
}

bool Gradients::contains(const at::Tensor& leaf) const {
  return places_.contains(leaf.unsafeGetTensorImpl());
}

at::Tensor Gradients::at(const at::Tensor& leaf) const {
  const auto place = places_.find(leaf.unsafeGetTensorImpl());
  if (place == places_.end()) {
    fail(ErrorKind::kInvalidArgument, "autograd: there is no gradient of this tensor among ",
         items_.size(), ": the roots do not depend on it, or it is not a leaf of this worker");
  }
  return items_[place->second].second;
}

// --- Contexts ----------------------------------------------------------------------------------

ContextRef::ContextRef(std::shared_ptr<ContextState> state) : state_(std::move(state)) {}

ContextId ContextRef::id() const { return state_->id(); }

rpc::Session ContextRef::session() const { return rpc::Session(state_->registry().session()); }

namespace {

void require_open(const ContextState& state) {
  if (state.released()) {
    fail(ErrorKind::kInvalidArgument, "autograd: context ", state.id(), " has been released");
  }
}

// The texts are those of torch.distributed.autograd.
std::vector<torch::autograd::Edge> edges_of(const std::vector<at::Tensor>& roots,
                                            const BackwardOptions& options) {
  const auto& gradients = options.gradients;
  if (roots.empty()) {
    fail(ErrorKind::kInvalidArgument, "No tensors provided for gradient computation.");
  }
  if (!gradients.empty() && gradients.size() != roots.size()) {
    fail(ErrorKind::kInvalidArgument, "autograd: ", roots.size(), " roots, but ", gradients.size(),
         " gradients");
  }
  std::vector<torch::autograd::Edge> edges;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (!root.defined() || !root.requires_grad()) {
      fail(ErrorKind::kInvalidArgument, "requires_grad not set on root ", i);
    }
    const bool given = !gradients.empty() && gradients[i].defined();
    if (!given && root.numel() != 1) {
      fail(ErrorKind::kInvalidArgument, "root ", i, " has ", root.numel(),
           " elements: it is not a scalar, all roots need to be scalar, or to have gradients in "
           "BackwardOptions");
    }
    if (!given && root.is_complex()) {
      fail(ErrorKind::kInvalidArgument, "grad can be computed only for real scalar outputs: root ",
           i, " is ", root.scalar_type(), "; give its gradient in BackwardOptions");
    }
    if (given && !gradients[i].sizes().equals(root.sizes())) {
      fail(ErrorKind::kInvalidArgument, "autograd: gradient ", i, " has other sizes than its root");
    }
    if (given && gradients[i].is_complex() != root.is_complex()) {
      fail(ErrorKind::kInvalidArgument, "autograd: gradient ", i, " is ",
           gradients[i].scalar_type(), ", but its root is ", root.scalar_type());
    }
    if (!root.grad_fn()) {
      fail(ErrorKind::kInvalidArgument, "root ", i, " does not have a valid gradient function.");
    }
    edges.push_back(torch::autograd::impl::gradient_edge(root));
  }
  return edges;
}

}  // namespace

void ContextRef::backward(const std::vector<at::Tensor>& roots,
                          const BackwardOptions& options) const {
  require_open(*state_);
  if (options.create_graph) {
    fail(ErrorKind::kUnsupported,
         "autograd: create_graph: gradients of gradients do not go across workers");
  }
  if (options.timeout.count() < 0) {
    fail(ErrorKind::kInvalidArgument, "autograd: timeout must be >= 0 ms, got ",
         options.timeout.count());
  }
  const auto edges = edges_of(roots, options);
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const bool given = !options.gradients.empty() && options.gradients[i].defined();
    gradients.push_back(given ? options.gradients[i]
                              : at::ones_like(roots[i].detach(), at::MemoryFormat::Preserve));
  }
  std::make_shared<detail::Coordinator>(state_, options)->run(edges, std::move(gradients));
}

Gradients ContextRef::gradients() const {
  require_open(*state_);
  for (const auto& pass : state_->registry().passes_of(id())) pass->wait_for_decision();
  return Gradients(state_->gradients());
}

ContextInfo ContextRef::info() const {
  const Registry& registry = state_->registry();
  const auto report = state_->report();
  ContextInfo info;
  info.id = id();
  const auto convert = [&](const detail::MessageReport& each) {
    return MessageInfo{each.message, registry.name_of(each.peer), each.function, each.reply,
                       each.tensors};
  };
  for (const auto& each : report.sends) info.sends.push_back(convert(each));
  for (const auto& each : report.recvs) info.recvs.push_back(convert(each));
  for (const auto worker : report.known) info.known_workers.push_back(registry.name_of(worker));
  info.passes = registry.passes_of(id()).size();
  return info;
}

struct Scope::Impl {
  explicit Impl(std::shared_ptr<rpc::detail::Recorder> recorder) : scope(std::move(recorder)) {}
  rpc::detail::RecorderScope scope;
};

Scope::Scope(const ContextRef& context) {
  auto recorder = rpc::detail::current_recorder();
  const auto other = recorder ? detail::FrameRecorder::context_of(*recorder) : nullptr;
  if (other && other != context.state_) {
    fail(ErrorKind::kInvalidArgument,
         "Already have autograd context id for this thread: ", other->id());
  }
  if (!recorder) {
    recorder = detail::FrameRecorder::of(context.state_);
    recorder->resumes();  // from here on: its first node must not be number 0
  }
  impl_ = std::make_unique<Impl>(std::move(recorder));
}
Scope::~Scope() = default;

namespace {

// Before anything is made.
std::shared_ptr<ContextState> new_context(const rpc::Session& session) {
  if (has_current()) {
    fail(ErrorKind::kInvalidArgument,
         "Already have autograd context id for this thread: ", current().id());
  }
  return Registry::of(session).make_context();
}

}  // namespace

Context::Context(const rpc::Session& session)
    : ContextRef(new_context(session)), scope_(std::make_unique<Scope>(*this)) {}

Context::~Context() {
  scope_.reset();
  try {
    release();
  } catch (const std::exception& error) {
    log_info("autograd: a context was not released on other workers: ", error.what());
  }
}

void ContextRef::release() const { state_->registry().release_own(id()); }

bool has_current() { return rpc::detail::current_recorder() != nullptr; }

ContextRef current() {
  const auto recorder = rpc::detail::current_recorder();
  if (!recorder) {
    fail(ErrorKind::kInvalidArgument,
         "Current thread doesn't have a valid autograd context: make a "
         "convoy::autograd::Context first");
  }
  return ContextRef(detail::FrameRecorder::context_of(*recorder));
}

ContextRef find(const rpc::Session& session, ContextId id) {
  auto found = Registry::of(session).find(id);
  if (!found) fail(ErrorKind::kInvalidArgument, "Could not find autograd context with id: ", id);
  return ContextRef(std::move(found));
}

Stats stats(const rpc::Session& session) {
  const Registry& registry = Registry::of(session);
  return {registry.contexts(), registry.passes()};
}

}  // namespace convoy::autograd
