#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "autograd/walk.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace convoy::autograd::detail {

// One run of libtorch's engine over a worker's part of a graph across workers: from roots, and from
// gates that let the gradients of messages in. Whoever recorded the graph (ReceivedNodes) and
// whoever carries gradients (Host) may be PyTorch's RPC as well as our own.
class GatedRun {
 public:
  // Called on the thread of run().
  class Host {
   public:
    virtual ~Host() = default;

    struct Arrived {
      const Walk::ActiveSend* send = nullptr;  // one that the run was made with
      std::vector<at::Tensor> gradients;
    };
    // Waits until the gradients of that message have come, or (0) of any that has not been taken
    // yet. Throws to end the run.
    virtual Arrived next_gradient(std::uint64_t message) = 0;
    // These go to the sender; undefined: that tensor has none.
    virtual void send_back(const Received& received, std::vector<at::Tensor>&& gradients) = 0;
    // All that comes for the leaf, once. After the leaf's hooks.
    virtual void arrived_at(torch::autograd::AccumulateGrad& leaf, const at::Tensor& gradient) = 0;
    // The engine itself accumulates into .grad, with all hooks; arrived_at() is not called.
    virtual bool engine_accumulates(torch::autograd::AccumulateGrad& leaf) = 0;
    // Undefined gradients go as zeros (FAST).
    virtual bool sends_zeros() const = 0;
    // The name lives until the next one.
    virtual void before_node(const char* name) = 0;
    // False: nothing more is run; run() returns.
    virtual bool after_node() = 0;
  };

  // A snapshot: the walk may grow afterwards. Leaves from this one on.
  GatedRun(Host& host, const Walk& walk, std::size_t first_leaf = 0);

  // Without it, roots only.
  void add_gates(const Walk& walk);
  // Each message has its place among the nodes: the number that it is given here.
  void add_gates(const Walk& walk,
                 const std::function<std::uint64_t(const SentMessage&)>& sequence_nr);

  // On this thread, until all gradients have come and gone. Throws what a node throws.
  void run(const std::vector<torch::autograd::Edge>& roots, std::vector<at::Tensor>&& gradients,
           bool retain);

  // --- for nodes ---

  struct Taken {
    torch::autograd::edge_list edges;  // none for tensors that do not take part
    torch::autograd::variable_list gradients;
  };
  static Taken take(Host::Arrived&& arrived);
  static GatedRun& current();   // kInvalidArgument: the engine was not started here
  static void begin_current();  // the engine has
  Host& host() { return host_; }
  bool is_current_task() const;
  void before_node(const char* name);
  void after_node();

 private:
  struct Parcel;
  class Watch;

  void begin();

  struct Gate {
    const Walk::ActiveSend* send;
    torch::autograd::Edge edge;
  };

  Host& host_;
  std::vector<Gate> gates_;
  bool in_order_ = false;  // each gate waits for its own message
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> leaves_;
  // Our nodes that stand for messages, and those of others, which are not run.
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> recvs_;
  std::vector<Walk::Reached> captured_;
  int task_ = -1;
};

}  // namespace convoy::autograd::detail
