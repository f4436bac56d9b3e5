#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "convoy/fields.h"

// SMART backward over contexts that PyTorch's own RPC has recorded: for the Python package.
namespace convoy::autograd::detail {

// The worker that sent a message, and gets its gradients: PyTorch's numbers of messages tell it.
inline int torch_sender(std::int64_t message) { return static_cast<int>(message >> 48); }

// Tensors of a message of PyTorch's that gradients will come for.
struct TorchPorts {
  std::int64_t message = 0;
  std::vector<std::uint32_t> tensors;
  CONVOY_FIELDS(message, tensors)
};

// One worker's part of a pass: first what of its graph takes part (follow()), then one run of
// libtorch's engine over that. Not thread-safe.
class TorchPass {
 public:
  // Carries gradients. Called on the thread of run().
  class Carrier {
   public:
    virtual ~Carrier() = default;
    struct Arrived {
      std::int64_t message = 0;
      std::vector<at::Tensor> gradients;
    };
    // Waits for those of any message that follow() was told of. Throws to end the run.
    virtual Arrived next() = 0;
    // To the sender of a message; undefined: that tensor has none.
    virtual void send_back(std::int64_t message, std::vector<at::Tensor>&& gradients) = 0;
    // False: nothing more is run, and run() returns.
    virtual bool goes_on() = 0;
  };

  // Throws PyTorch's error if this worker has no such context.
  explicit TorchPass(std::int64_t context);
  TorchPass(const TorchPass&) = delete;
  TorchPass& operator=(const TorchPass&) = delete;
  ~TorchPass();

  // What of other messages these depend on, as far as it is new.
  std::vector<TorchPorts> follow(const std::vector<at::Tensor>& roots);
  // The same of messages that this worker sent. kInvalidArgument.
  std::vector<TorchPorts> follow(const std::vector<TorchPorts>& sent);

  // Gradients of leaves are added to the context as they come; hooks run as in PyTorch's own pass.
  // Throws what a node throws.
  void run(const std::vector<at::Tensor>& roots, bool retain_graph, Carrier& carrier);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::autograd::detail
