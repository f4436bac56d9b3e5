#include "autograd/lineage.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "autograd/nodes.h"

namespace convoy::autograd::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

std::atomic<std::size_t> upstream_limit{Lineage::kMost};

// The nodes that were seen; few.
class SeenNodes {
 public:
  // False: it was there.
  bool add(const Node* node) {
    std::size_t at = (reinterpret_cast<std::uintptr_t>(node) >> 5) % kPlaces;
    while (places_[at]) {
      if (places_[at] == node) return false;
      at = (at + 1) % kPlaces;
    }
    places_[at] = node;
    return true;
  }
  void clear() { places_.fill(nullptr); }  // first

 private:
  static constexpr std::size_t kPlaces = 4 * Lineage::kMostNodes;
  std::array<const Node*, kPlaces> places_;
};

// Tensors of messages that came, which one tensor depends on.
class Search {
 public:
  // False: there are too many nodes, or tensors.
  bool follow(const Edge& edge) {
    reached_.clear();
    stack_.clear();
    if (!as_recv(*edge.function)) seen_.clear();
    if (!push(edge)) return false;
    while (!stack_.empty()) {
      const Node* const node = stack_.back();
      stack_.pop_back();
      for (const Edge& next : node->next_edges()) {
        if (!push(next)) return false;
      }
    }
    return true;
  }
  struct Reached {
    const RecvNode* recv;
    std::uint32_t tensors;
  };
  std::span<const Reached> reached() const { return {reached_.data(), reached_.size()}; }

 private:
  bool push(const Edge& edge) {
    if (!edge.is_valid()) return true;
    Node* const node = edge.function.get();
    if (const RecvNode* const recv = as_recv(*node)) {
      if (edge.input_nr >= Lineage::kMostTensors) return false;
      for (Reached& each : reached_) {
        if (each.recv != recv) continue;
        each.tensors |= bit(edge.input_nr);
        return true;
      }
      if (reached_.size() == Lineage::kMost) return false;
      reached_.push_back({recv, bit(edge.input_nr)});
      return true;
    }
    if (node->next_edges().empty()) return true;
    if (!seen_.add(node)) return true;
    if (--left_ < 0) return false;
    stack_.push_back(node);
    return true;
  }

  int left_ = Lineage::kMostNodes;
  c10::SmallVector<const Node*, 32> stack_;
  c10::SmallVector<Reached, 8> reached_;
  SeenNodes seen_;
};

}  // namespace

void set_most_upstream(std::size_t most) { upstream_limit.store(std::min(most, Lineage::kMost)); }

std::size_t most_upstream() { return upstream_limit.load(std::memory_order_relaxed); }

bool Lineage::add(const Upstream& one) {
  for (Upstream& each : all) {
    if (each.message != one.message) continue;
    if (each.of == one.of) {
      each.tensors |= one.tensors;
      return true;
    }
    if (each.tensors == one.tensors) {
      each.of |= one.of;
      return true;
    }
  }
  if (all.size() >= most_upstream()) return false;
  all.push_back(one);
  return true;
}

Lineage lineage_of(const std::vector<Edge>& edges, WorkerId self, const Origin& origin) {
  Lineage lineage;
  const auto give_up = [&lineage] {
    lineage.complete = false;
    lineage.all.clear();
    return std::move(lineage);
  };
  Search search;
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const Edge& edge = edges[i];
    // A leaf.
    if (!edge.is_valid() || edge.function->next_edges().empty()) continue;
    if (!search.follow(edge)) return give_up();
    if (search.reached().empty()) continue;
    if (i >= Lineage::kMostTensors) return give_up();
    const std::uint32_t of = bit(static_cast<std::uint32_t>(i));
    for (const auto& [recv, tensors] : search.reached()) {
      const Received& received = recv->received();
      if (!received.lineage.complete || received.origin != origin ||
          !lineage.add({received.message, received.sender, self, tensors, of})) {
        return give_up();
      }
      for (const Upstream& each : received.lineage.all) {
        if ((each.of & tensors) == 0) continue;
        if (!lineage.add({each.message, each.sender, each.receiver, each.tensors, of})) {
          return give_up();
        }
      }
    }
  }
  return lineage;
}

}  // namespace convoy::autograd::detail
