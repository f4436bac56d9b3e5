#pragma once

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "autograd/wire.h"

namespace torch::autograd {
struct Node;
}

namespace convoy::autograd::detail {

// A message as its sender remembers it.
struct SentMessage {
  std::uint64_t message = 0;
  WorkerId to = 0;
  std::string function;
  bool reply = false;
  std::vector<torch::autograd::Edge> edges;  // of its tensors that require grad, in order
};

// The part of a worker's graph that a pass runs: what was reached from the roots, and from sends
// that gradients will come for. It only grows. Not thread-safe.
class Walk {
 public:
  struct ActiveSend {
    std::shared_ptr<const SentMessage> sent;
    std::vector<bool> tensors;
  };

  // Follow these edges, or those of a send. What was reached for the first time of messages that
  // came here is in reached() then.
  void follow(const std::vector<torch::autograd::Edge>& edges);
  void follow(const std::shared_ptr<const SentMessage>& sent,
              const std::vector<std::uint32_t>& tensors);
  void follow_all(const std::shared_ptr<const SentMessage>& sent);
  std::vector<Ports> take_reached();

  const std::map<std::uint64_t, ActiveSend>& sends() const { return sends_; }
  // AccumulateGrad nodes, and others that lead nowhere.
  const std::vector<c10::intrusive_ptr<torch::autograd::Node>>& leaves() const { return leaves_; }
  std::size_t nodes() const { return visited_.size(); }

 private:
  void push(const torch::autograd::Edge& edge);
  void run();

  std::vector<torch::autograd::Node*> stack_;
  std::unordered_set<torch::autograd::Node*> visited_;
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> leaves_;
  std::map<std::uint64_t, ActiveSend> sends_;
  // Of recv nodes: which of their inputs were reached.
  std::unordered_map<torch::autograd::Node*, std::vector<bool>> recvs_;
  std::map<std::uint64_t, Ports> reached_;  // since take_reached()
};

}  // namespace convoy::autograd::detail
