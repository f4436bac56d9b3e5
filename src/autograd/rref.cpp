// Passes whose roots are references.
#include "convoy/rref.h"

#include <optional>
#include <string>
#include <vector>

#include "autograd/registry.h"
#include "base/error.h"
#include "convoy/autograd.h"
#include "convoy/fields.h"

namespace convoy::autograd {
namespace {

// How much longer the call to the owner may take than the pass there.
constexpr std::chrono::seconds kCallMargin(30);

}  // namespace

namespace detail {

// What the owner is told of BackwardOptions.
struct PassOptions {
  bool fast = false;
  bool retain = false;
  bool deterministic = false;
  std::int64_t timeout = 0;  // milliseconds
  std::vector<StepId> optimizers;
  CONVOY_FIELDS(fast, retain, deterministic, timeout, optimizers)
};

// Why a pass failed that ran at the owner. It is a result: the error of a call would be the
// owner's, whoever's it is.
struct PassFailure {
  std::int32_t kind = 0;
  std::string worker;  // empty: the owner; there was no pass
  std::string type;
  std::string text;
  CONVOY_FIELDS(kind, worker, type, text)
};

// At the owner.
std::optional<PassFailure> backward_of_reference(const rpc::RRef<at::Tensor>& root,
                                                 ContextId context, const PassOptions& sent) {
  BackwardOptions options;
  options.mode = sent.fast ? Mode::kFast : Mode::kSmart;
  options.retain_graph = sent.retain;
  options.deterministic = sent.deterministic;
  options.timeout = std::chrono::milliseconds(sent.timeout);
  options.optimizers = sent.optimizers;
  // The value first: the call that makes it also makes the context here, and may still be running.
  const at::Tensor& value = root.local_value();
  try {
    find(rpc::current().session(), context).backward({value}, options);
    return std::nullopt;
  } catch (const rpc::RemoteError& error) {
    return PassFailure{static_cast<std::int32_t>(error.kind()), error.worker(), error.remote_type(),
                       error.what()};
  } catch (const Error& error) {
    return PassFailure{static_cast<std::int32_t>(error.kind()), "", "", error.what()};
  }
}
CONVOY_RPC(backward_of_reference);

}  // namespace detail

void backward_from(const ContextRef& context, const rpc::RRef<at::Tensor>& root,
                   const BackwardOptions& options) {
  if (root.is_owner()) return context.backward({root.local_value()}, options);
  if (!options.gradients.empty() || options.create_graph) {
    fail(ErrorKind::kUnsupported,
         "autograd: backward() of a reference takes no gradients of its root, and makes no graph");
  }
  static_cast<void>(find(context.session(), context.id()));  // is it still there?
  // The pass has its own deadline; the call only follows it.
  rpc::CallOptions call;
  const bool limited = options.timeout.count() != 0 &&
                       options.timeout < std::chrono::milliseconds::max() - kCallMargin;
  call.timeout = limited ? options.timeout + kCallMargin : std::chrono::milliseconds(0);
  const rpc::detail::RecorderScope not_recorded(nullptr);
  const auto failure = context.session()
                           .to(root.owner(), call)
                           .rpc_sync<detail::backward_of_reference>(
                               root, context.id(),
                               detail::PassOptions{options.mode == Mode::kFast,
                                                   options.retain_graph, options.deterministic,
                                                   options.timeout.count(), options.optimizers});
  if (!failure) return;
  const auto kind = static_cast<ErrorKind>(failure->kind);
  if (!failure->worker.empty()) {
    throw rpc::RemoteError(kind, failure->text, failure->worker, failure->type);
  }
  const std::string owner = root.owner_name();
  throw rpc::RemoteError(
      kind, concat("autograd: backward() of a reference, on ", owner, ": ", failure->text), owner,
      failure->type);
}

}  // namespace convoy::autograd
