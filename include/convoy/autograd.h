#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "convoy/rpc.h"
#include "convoy/rref.h"

// Distributed autograd: gradients across workers. While a context exists, the RPC calls of this
// thread are recorded, and so are the calls that their handlers make. backward() then follows the
// gradients back through all recorded calls.
//
//   convoy::autograd::Context context(rpc);
//   auto t3 = rpc.rpc_sync<my_add>("worker1", t1, t2);
//   auto loss = (t3 * t4).sum();
//   context.backward({loss});
//   auto grads = context.gradients();                  // by tensor; .grad is untouched
//   std::cout << grads.at(t1);
//
// See docs/reference/autograd.md.
namespace convoy::autograd {

// Which recorded calls take part in a backward pass.
enum class Mode {
  kSmart,  // only calls that the roots depend on, tensor by tensor; finds them first
  kFast,   // all calls; if the result of one was not used, the pass fails at its deadline
};

// Names an optimizer that steps during a backward pass (convoy/distributed_optimizer.h).
using StepId = std::uint64_t;

struct BackwardOptions {
  Mode mode = Mode::kSmart;
  bool retain_graph = false;  // keeps the graph, so that another pass can use it
  bool create_graph = false;  // must be false: true throws kUnsupported
  // Gradients are added in program order, as in one process, so that every run gives the same bits.
  // Workers wait for each other more. Throws kUnsupported if calls are nested more than 15 deep.
  bool deterministic = false;
  // Gradients of the roots, one for each. Empty: the roots are scalars, and their gradients are 1.
  std::vector<at::Tensor> gradients = {};
  // Optimizers to step, from DistributedOptimizer::in_backward(). Each worker steps them with the
  // context's gradients as soon as its part of the pass is done. If the pass fails, some workers
  // may have stepped already; the error names them.
  std::vector<StepId> optimizers = {};
  // Limit of the whole pass, on all workers. 0: no limit. The timeout of RPC calls does not apply.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

// Unique in a session. `id >> 48` is the rank of the worker that created the context.
using ContextId = std::uint64_t;

// The gradients that backward passes have computed on this worker, by leaf tensor. It is a
// snapshot: later passes add no entries. Its tensors are those of the context: a later pass in the
// same context may add to them in place.
class Gradients {
 public:
  using Item = std::pair<at::Tensor, at::Tensor>;  // leaf, gradient

  Gradients() = default;
  explicit Gradients(std::vector<Item> items);

  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  bool contains(const at::Tensor& leaf) const;
  // Throws kInvalidArgument if the leaf has no gradient here.
  at::Tensor at(const at::Tensor& leaf) const;
  // Iterates over all items, in no particular order.
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<const void*, std::size_t> places_;
};

// One end of a recorded message, on the worker that sent or received it.
struct MessageInfo {
  std::uint64_t message = 0;  // number of the message, the same on both sides
  std::string peer;           // the worker on the other side
  std::string function;
  bool reply = false;       // a reply; false: a call
  std::size_t tensors = 0;  // number of its tensors that require grad
};

// What this worker knows of a context.
struct ContextInfo {
  ContextId id = 0;
  std::vector<MessageInfo> sends = {};
  std::vector<MessageInfo> recvs = {};
  std::vector<std::string> known_workers = {};  // workers to which it sent a message
  std::size_t passes = 0;                       // passes that run here now
};

enum class DumpFormat { kText, kGraphviz };

namespace detail {
class ContextState;
}

// A reference to a context, as one worker sees it. A value. It does not keep the context open.
// Thread-safe.
class ContextRef {
 public:
  ContextId id() const;
  rpc::Session session() const;  // throws kCancelled if the session has ended

  // Computes the gradients of `roots` with respect to all leaves that they depend on, on all
  // workers, and adds them to the context there. Roots must be tensors of this worker. Blocks until
  // the gradients are in the context on all workers.
  //
  // On failure no worker has added anything. Throws rpc::RemoteError, which names the worker:
  // kRemote if a node, a hook or a message failed there, kPeerLost if it died, kTimeout at the
  // deadline. Throws kInvalidArgument for bad roots or a negative timeout, or if the context was
  // released.
  void backward(const std::vector<at::Tensor>& roots, const BackwardOptions& options = {}) const;
  // The gradients of this worker's leaves. If a pass has finished here but not yet everywhere,
  // blocks until its root has decided. Throws kTimeout if the root does not answer, kCancelled if
  // the session is shut down meanwhile, kInvalidArgument if the context was released.
  Gradients gradients() const;

  // What this worker has recorded. Does not communicate.
  ContextInfo info() const;
  // Describes the context on all of its workers: which messages were sent, which of them take part
  // in passes, and which gradients the passes wait for. Asks the other workers, and blocks until
  // they have answered. A worker that does not answer within 10 seconds is listed with the reason.
  std::string dump(DumpFormat format = DumpFormat::kText) const;

 protected:
  explicit ContextRef(std::shared_ptr<detail::ContextState> state);
  void release() const;

 private:
  friend class Scope;
  friend ContextRef current();
  friend ContextRef find(const rpc::Session& session, ContextId id);

  std::shared_ptr<detail::ContextState> state_;
};

// While it lives, calls of this thread are also recorded in `context`. Destroy it on the thread
// that made it. Throws kInvalidArgument if the thread is in another context.
class Scope {
 public:
  explicit Scope(const ContextRef& context);
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Creates a context, and ends it on destruction. While it lives, calls of this thread are recorded
// in it. Destroy it on the thread that made it. A thread can be in one context at a time: the
// constructor throws kInvalidArgument if it is in one already.
class Context : public ContextRef {
 public:
  explicit Context(const rpc::Session& session);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  // Ends the context on all workers. Does not wait for them.
  ~Context();

 private:
  std::unique_ptr<Scope> scope_;
};

// The context of this thread: the one that it made or entered, or in a handler that of the call.
// current() throws kInvalidArgument if there is none.
bool has_current();
ContextRef current();
// Finds a context that this worker knows. Throws kInvalidArgument if there is none with this id.
ContextRef find(const rpc::Session& session, ContextId id);

// Runs a pass whose root is the value of `root`, at its owner. Same as RRef::backward() with a
// context. Blocks and throws as ContextRef::backward(). If the owner is another worker, also throws
// kUnsupported when BackwardOptions::gradients is set.
void backward_from(const ContextRef& context, const rpc::RRef<at::Tensor>& root,
                   const BackwardOptions& options = {});

// Counts of this worker.
struct Stats {
  std::size_t contexts = 0;
  std::size_t passes = 0;  // that run here now, whichever worker started them
};
Stats stats(const rpc::Session& session);

}  // namespace convoy::autograd
