#pragma once

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "autograd/lineage.h"
#include "autograd/wire.h"

namespace torch::autograd {
struct Node;
}

// One worker's part of a graph across workers. Nothing here knows who recorded it, or how workers
// talk to each other.
namespace convoy::autograd::detail {

struct FramePlace;

// A message as its sender remembers it.
struct SentMessage {
  std::uint64_t message = 0;
  WorkerId to = 0;
  std::string function;
  bool reply = false;
  std::vector<torch::autograd::Edge> edges;  // of its tensors that require grad, in order
  // Where in the program it was sent.
  std::shared_ptr<const FramePlace> place = nullptr;
  std::uint32_t element = 0;
};

// A node that stands for tensors of a message that came: its gradients go back to the sender.
struct Received {
  std::uint64_t message = 0;
  WorkerId sender = 0;
  Lineage lineage = {};  // of what the sender had
  Origin origin = {};
};

// Which nodes these are: nullptr for others.
class ReceivedNodes {
 public:
  virtual ~ReceivedNodes() = default;
  virtual const Received* find(const torch::autograd::Node& node) const = 0;
};
// Those of our own calls.
const ReceivedNodes& own_received_nodes();

// What takes part in a pass, by worker. None if somebody must be asked.
using Plan = std::map<WorkerId, PlanPart>;

// The part of a worker's graph that a pass runs: what was reached from the roots, and from sends
// that gradients will come for. It only grows. Not thread-safe.
class Walk {
 public:
  // Of a pass of that origin: what came elsewhere does not belong to it.
  explicit Walk(const ReceivedNodes& received = own_received_nodes(), const Origin& origin = {})
      : received_(received), origin_(origin) {}

  struct ActiveSend {
    std::shared_ptr<const SentMessage> sent;
    std::vector<bool> tensors;
  };
  // A message that came, tensors of which were reached.
  struct Reached {
    const Received* received = nullptr;
    c10::intrusive_ptr<torch::autograd::Node> node;
    std::vector<bool> tensors;
  };

  // Follow these edges, or those of a send. What was reached for the first time of messages that
  // came here is in take_reached() then. kInvalidArgument if they lead to another context.
  void follow(const std::vector<torch::autograd::Edge>& edges);
  void follow(const std::shared_ptr<const SentMessage>& sent,
              const std::vector<std::uint32_t>& tensors);
  void follow(const std::shared_ptr<const SentMessage>& sent, std::uint32_t tensors);  // bits
  void follow_all(const std::shared_ptr<const SentMessage>& sent);
  std::vector<Ports> take_reached();
  // How many tensors were reached, in all.
  std::uint32_t ports() const { return ports_; }
  // What they depend on, everywhere, as they say themselves. None: they do not say all.
  std::optional<Plan> plan(WorkerId self) const;
  // Whether what was reached shares no node with these sends; perhaps not, if there are many.
  bool is_apart_from(const std::vector<std::shared_ptr<const SentMessage>>& sends) const;

  const std::map<std::uint64_t, ActiveSend>& sends() const { return sends_; }
  // AccumulateGrad nodes, and others that lead nowhere.
  const std::vector<c10::intrusive_ptr<torch::autograd::Node>>& leaves() const { return leaves_; }
  const std::unordered_map<const torch::autograd::Node*, Reached>& reached() const {
    return reached_;
  }
  // But for those of messages that came.
  const std::unordered_set<torch::autograd::Node*>& nodes() const { return visited_; }

 private:
  void push(const torch::autograd::Edge& edge);
  void run();

  const ReceivedNodes& received_;
  const Origin origin_;
  std::vector<torch::autograd::Node*> stack_;
  std::unordered_set<torch::autograd::Node*> visited_;
  std::vector<c10::intrusive_ptr<torch::autograd::Node>> leaves_;
  std::map<std::uint64_t, ActiveSend> sends_;
  std::unordered_map<const torch::autograd::Node*, Reached> reached_;
  std::map<std::uint64_t, Ports> new_;  // since take_reached()
  std::uint32_t ports_ = 0;
};

}  // namespace convoy::autograd::detail
