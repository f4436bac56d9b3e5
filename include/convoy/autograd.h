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

// Gradients across workers. While a context is there, calls that this thread makes are recorded,
// and those that their handlers make; backward() then follows the gradients back through all of
// them.
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

// Which calls of a context take part in a backward pass.
enum class Mode {
  kSmart,  // those that the roots depend on, tensor by tensor: they are found out first
  kFast,   // all of them; a call whose result was not used makes the pass fail at its deadline
};

// An optimizer that steps in a backward pass (convoy/distributed_optimizer.h).
using StepId = std::uint64_t;

struct BackwardOptions {
  Mode mode = Mode::kSmart;
  bool retain_graph = false;  // another pass may use the same graph
  bool create_graph = false;  // kUnsupported
  // Gradients are added in the order of the program, as in one process: the same bits in every run.
  // Workers then wait for each other more. kUnsupported if calls are nested more than 15 deep.
  bool deterministic = false;
  // One for each root. None: the roots are scalars, and these are ones.
  std::vector<at::Tensor> gradients = {};
  // Each worker steps these with the context's gradients as soon as its part of the pass is done:
  // DistributedOptimizer::in_backward(). A pass that fails then may have stepped some workers'
  // parameters; its error says which.
  std::vector<StepId> optimizers = {};
  // Of the whole pass, on all workers, whatever the time-out of calls is; 0: never.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

// Unique in a session. The worker that made it: id >> 48.
using ContextId = std::uint64_t;

// The gradients that backward passes have left on this worker, by leaf. A copy: later passes do not
// change which tensors are in it.
class Gradients {
 public:
  using Item = std::pair<at::Tensor, at::Tensor>;  // leaf, gradient

  Gradients() = default;
  explicit Gradients(std::vector<Item> items);

  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  bool contains(const at::Tensor& leaf) const;
  // kInvalidArgument if there is none.
  at::Tensor at(const at::Tensor& leaf) const;
  // In no order.
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<const void*, std::size_t> places_;
};

// One half of a recorded message, on the worker that has it.
struct MessageInfo {
  std::uint64_t message = 0;  // the same on both sides
  std::string peer;           // the worker on the other side
  std::string function;
  bool reply = false;
  std::size_t tensors = 0;  // that require grad
};

// What this worker has of a context.
struct ContextInfo {
  ContextId id = 0;
  std::vector<MessageInfo> sends = {};
  std::vector<MessageInfo> recvs = {};
  std::vector<std::string> known_workers = {};  // to which it sent something
  std::size_t passes = 0;                       // under way here
};

enum class DumpFormat { kText, kGraphviz };

namespace detail {
class ContextState;
}

// A context, as seen from a worker. A value; refers to the context without keeping it open.
// Thread-safe.
class ContextRef {
 public:
  ContextId id() const;
  rpc::Session session() const;  // kCancelled if it has ended

  // Computes the gradients of the roots, which are of this worker, with respect to all leaves that
  // they depend on, wherever these are, and adds them to what this context has there. Blocks. On
  // failure nothing was added anywhere: rpc::RemoteError with the worker (kRemote: a node, a hook
  // or a message failed there; kPeerLost; kTimeout), Error kInvalidArgument for bad roots.
  void backward(const std::vector<at::Tensor>& roots, const BackwardOptions& options = {}) const;
  // Of this worker's leaves.
  Gradients gradients() const;

  ContextInfo info() const;
  // The context on all of its workers: who sent what to whom, what takes part in passes, and what
  // these wait for. Asks the others; kTimeout.
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

// This thread's calls are recorded in that context, too. kInvalidArgument if it has another.
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

// Begins and ends a context. This thread's calls are recorded in it as long as it lives; it must go
// on the thread that made it. A thread has one at a time: kInvalidArgument if it has another.
class Context : public ContextRef {
 public:
  explicit Context(const rpc::Session& session);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  // All workers forget it; does not wait for them.
  ~Context();

 private:
  std::unique_ptr<Scope> scope_;
};

// The context of this thread: its own, or that of the call whose handler it runs.
bool has_current();
ContextRef current();  // kInvalidArgument if there is none
// One that this worker has. kInvalidArgument.
ContextRef find(const rpc::Session& session, ContextId id);

// RRef::backward() with a context: a pass whose root is the value, run at its owner.
void backward_from(const ContextRef& context, const rpc::RRef<at::Tensor>& root,
                   const BackwardOptions& options = {});

// Of this worker.
struct Stats {
  std::size_t contexts = 0;
  std::size_t passes = 0;  // under way, as their root or not
};
Stats stats(const rpc::Session& session);

}  // namespace convoy::autograd
