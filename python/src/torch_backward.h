#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "convoy/detail/torch_pass.h"
#include "convoy/fields.h"
#include "convoy/rpc.h"
#include "work_pool.h"

namespace convoy::python {

// A backward pass over a context of torch.distributed.autograd: who is its root, and which of that
// one's.
struct TorchPassId {
  std::int32_t root = 0;
  std::uint64_t number = 0;
  CONVOY_FIELDS(root, number)

  friend auto operator<=>(const TorchPassId&, const TorchPassId&) = default;
};

// What a worker is told when it first hears of a pass.
struct TorchPassHead {
  TorchPassId pass;
  std::int64_t context = 0;
  bool retain_graph = false;
  std::uint64_t remaining = 0;  // milliseconds; 0: never
  CONVOY_FIELDS(pass, context, retain_graph, remaining)
};

// How it went on one worker.
struct TorchPassResult {
  std::int32_t kind = 0;  // of its error
  std::string type;
  std::string text;
  bool failed = false;
  CONVOY_FIELDS(kind, type, text, failed)
};

// SMART backward passes over contexts of torch.distributed.autograd, between the workers of an
// agent. The root asks all workers that its roots depend on what of their graphs takes part, then
// lets all of them run their parts (TorchPass); gradients go from worker to worker. A worker that
// fails, or dies, ends the pass everywhere. Thread-safe.
class TorchBackward final : public std::enable_shared_from_this<TorchBackward> {
 public:
  // Parts that others ask for run on these threads.
  TorchBackward(rpc::Session session, std::shared_ptr<WorkPool> threads);
  TorchBackward(const TorchBackward&) = delete;
  TorchBackward& operator=(const TorchBackward&) = delete;
  ~TorchBackward();

  // Waits; 0: for any time. rpc::RemoteError with the worker.
  void backward(std::int64_t context, const std::vector<at::Tensor>& roots, bool retain_graph,
                std::chrono::milliseconds timeout);
  // Passes that run here.
  std::size_t under_way() const;
  void abort_all(const std::string& why);

  // --- what workers ask each other ---

  using Ports = autograd::detail::TorchPorts;
  std::vector<Ports> expand(const TorchPassHead& head, const std::vector<Ports>& sent);
  rpc::Future<TorchPassResult> run(const TorchPassId& pass);
  void take(const TorchPassId& pass, std::int64_t message, std::vector<at::Tensor> gradients);
  void abort(const TorchPassId& pass, const std::string& why);

 private:
  class Part;
  class Root;

  std::shared_ptr<Part> find(const TorchPassId& pass) const;  // nullptr
  void drop(const TorchPassId& pass);
  void watch(int root);

  const rpc::Session session_;
  const int self_;
  const std::shared_ptr<WorkPool> threads_;

  mutable std::mutex mutex_;
  // Guarded by it:
  std::map<TorchPassId, std::shared_ptr<Part>> parts_;
  std::set<int> watched_;  // roots whose end is heard of
  std::uint64_t last_ = 0;
};

}  // namespace convoy::python
