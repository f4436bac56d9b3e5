#include "convoy/detail/torch_pass.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "autograd/gated.h"
#include "autograd/walk.h"
#include "base/error.h"
#include "ddp/gradient_home.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;
namespace dist_autograd = torch::distributed::autograd;

// What adds a gradient to a context of PyTorch's is private there. An explicit instantiation may
// name it.
constexpr auto torch_accumulate();
template <auto Member>
struct Opened {
  friend constexpr auto torch_accumulate() { return Member; }
};
template struct Opened<&dist_autograd::DistAutogradContext::accumulateGrad>;

// References to a gradient when it arrives at a leaf, if nobody else has it: the engine's input,
// what it captures, and the hook's own.
constexpr std::size_t kOwnReferences = 3;

// The nodes of PyTorch's that stand for messages.
class TorchReceivedNodes final : public ReceivedNodes {
 public:
  explicit TorchReceivedNodes(const dist_autograd::DistAutogradContext& context) {
    static auto* const mutex = new std::mutex();
    const std::scoped_lock lock(*mutex);  // passes that begin at once
    for (const auto& [message, node] : context.recvFunctions()) {
      // Before all others, gates above all: gradients leave as early as they can.
      if (node->sequence_nr() != UINT64_MAX) node->set_sequence_nr(UINT64_MAX);
      Received& received = all_[node.get()];
      received.message = static_cast<std::uint64_t>(message);
      nodes_.push_back(node);
    }
  }

  const Received* find(const ag::Node& node) const override {
    const auto found = all_.find(&node);
    return found == all_.end() ? nullptr : &found->second;
  }

 private:
  std::unordered_map<const ag::Node*, Received> all_;
  std::vector<c10::intrusive_ptr<ag::Node>> nodes_;  // so that nobody else gets their addresses
};

std::vector<TorchPorts> as_torchs(const std::vector<Ports>& ports) {
  std::vector<TorchPorts> result;
  for (const Ports& each : ports) {
    result.push_back({static_cast<std::int64_t>(each.message), each.tensors});
  }
  return result;
}

}  // namespace

struct TorchPass::Impl final : public GatedRun::Host {
  explicit Impl(dist_autograd::ContextPtr recorded)
      : context(std::move(recorded)), received(*context), walk(received) {}

  Arrived next_gradient(std::uint64_t) override {
    Carrier::Arrived arrived = carrier->next();
    RECORD_FUNCTION("torch::distributed::autograd::SendRpcBackward", {});
    const auto found = walk.sends().find(static_cast<std::uint64_t>(arrived.message));
    if (found == walk.sends().end() || found->second.tensors.size() != arrived.gradients.size()) {
      fail(ErrorKind::kInternal, "autograd: unexpected gradients arrived: message ",
           arrived.message);
    }
    return {&found->second, std::move(arrived.gradients)};
  }

  void send_back(const Received& back, std::vector<at::Tensor>&& gradients) override {
    RECORD_FUNCTION("torch::distributed::autograd::RecvRpcBackward", {});
    carrier->send_back(static_cast<std::int64_t>(back.message), std::move(gradients));
  }

  void arrived_at(ag::AccumulateGrad& leaf, const at::Tensor& gradient) override {
    ((*context).*torch_accumulate())(leaf.variable, gradient, kOwnReferences);
    // As in PyTorch's pass: a gradient that goes to two leaves is nobody's own.
    kept.push_back(gradient);
  }

  bool engine_accumulates(ag::AccumulateGrad& leaf) override {
    for (const auto& hook : leaf.post_hooks()) {
      if (dynamic_cast<const ReducerHook*>(hook.get()) == nullptr) continue;
      fail(ErrorKind::kUnsupported,
           "convoy.DistributedDataParallel does not work in a context of "
           "torch.distributed.autograd: use torch's class there, or contexts of convoy.rpc");
    }
    return false;
  }

  bool sends_zeros() const override { return false; }
  void before_node(const char*) override {}
  bool after_node() override { return carrier->goes_on(); }

  const dist_autograd::ContextPtr context;
  const TorchReceivedNodes received;
  Walk walk;
  std::map<std::int64_t, std::shared_ptr<const SentMessage>> sent;
  // While it runs:
  Carrier* carrier = nullptr;
  std::vector<at::Tensor> kept;
};

TorchPass::TorchPass(std::int64_t context)
    : impl_(std::make_unique<Impl>(
          dist_autograd::DistAutogradContainer::getInstance().retrieveContext(context))) {}

TorchPass::~TorchPass() = default;

std::vector<TorchPorts> TorchPass::follow(const std::vector<at::Tensor>& roots) {
  std::vector<ag::Edge> edges;
  for (const at::Tensor& root : roots) edges.push_back(ag::impl::gradient_edge(root));
  impl_->walk.follow(edges);
  return as_torchs(impl_->walk.take_reached());
}

std::vector<TorchPorts> TorchPass::follow(const std::vector<TorchPorts>& sent) {
  for (const TorchPorts& each : sent) {
    auto& message = impl_->sent[each.message];
    if (!message) {
      auto made = std::make_shared<SentMessage>();
      made->message = static_cast<std::uint64_t>(each.message);
      made->edges = impl_->context->retrieveSendFunction(each.message)->next_edges();
      message = std::move(made);
    }
    impl_->walk.follow(message, each.tensors);
  }
  return as_torchs(impl_->walk.take_reached());
}

void TorchPass::run(const std::vector<at::Tensor>& roots, bool retain_graph, Carrier& carrier) {
  std::vector<ag::Edge> edges;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& root : roots) {
    edges.push_back(ag::impl::gradient_edge(root));
    gradients.push_back(at::ones_like(root, at::MemoryFormat::Preserve));
  }
  if (edges.empty() && impl_->walk.sends().empty()) return;
  impl_->carrier = &carrier;
  GatedRun engine(*impl_, impl_->walk);
  engine.add_gates(impl_->walk);
  // Where hooks find the gradients: torch's DistributedDataParallel.
  const dist_autograd::ThreadLocalDistAutogradContext here(
      dist_autograd::ContextPtr(impl_->context));
  engine.run(edges, std::move(gradients), retain_graph);
  impl_->kept.clear();
}

}  // namespace convoy::autograd::detail
