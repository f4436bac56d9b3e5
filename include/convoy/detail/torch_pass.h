#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "convoy/fields.h"

// The SMART distributed backward pass over contexts that PyTorch's own RPC has recorded. For the
// Python package.
namespace convoy::autograd::detail {

// The id of the worker that sent a message and gets its gradients. It is part of PyTorch's message
// number.
inline int torch_sender(std::int64_t message) { return static_cast<int>(message >> 48); }

// Tensors of one of PyTorch's messages that gradients will arrive for.
struct TorchPorts {
  std::int64_t message = 0;
  std::vector<std::uint32_t> tensors;
  CONVOY_FIELDS(message, tensors)
};

// One worker's part of a backward pass. First follow() finds the part of its graph that takes part,
// then run() runs libtorch's engine over it once. Not thread-safe.
class TorchPass {
 public:
  // Carries gradients between workers. Called on the thread of run().
  class Carrier {
   public:
    virtual ~Carrier() = default;
    struct Arrived {
      std::int64_t message = 0;
      std::vector<at::Tensor> gradients;
    };
    // Blocks until the gradients of a message are there. The message is one that follow() was told
    // of. Throws to end the run.
    virtual Arrived next() = 0;
    // Sends gradients to the sender of a message. An undefined tensor: there is no gradient.
    virtual void send_back(std::int64_t message, std::vector<at::Tensor>&& gradients) = 0;
    // Returns false to stop: then run() returns.
    virtual bool goes_on() = 0;
  };

  // Throws PyTorch's error if this worker does not have the context.
  explicit TorchPass(std::int64_t context);
  TorchPass(const TorchPass&) = delete;
  TorchPass& operator=(const TorchPass&) = delete;
  ~TorchPass();

  // Returns the received tensors that these roots depend on, except those of earlier calls.
  std::vector<TorchPorts> follow(const std::vector<at::Tensor>& roots);
  // The same for tensors of messages that this worker sent. Throws kInvalidArgument for a tensor
  // number that the message does not have.
  std::vector<TorchPorts> follow(const std::vector<TorchPorts>& sent);

  // Runs the engine; blocks until it is through. Gradients of leaves are added to the context as
  // they are computed. Hooks run as in PyTorch's own pass. Throws the error of a node, and
  // kUnsupported for parameters of convoy.DistributedDataParallel.
  void run(const std::vector<at::Tensor>& roots, bool retain_graph, Carrier& carrier);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::autograd::detail
