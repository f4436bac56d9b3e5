#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ddp/graph.h"

namespace convoy {

// The forwards of a reducer whose backwards have not come, and their outputs.
class Forwards {
 public:
  // A gradient with a history was computed: its backward passes no sink.
  bool armed = false;
  // Why this rank does not come to a backward of the others, who hear it in its next forward.
  std::string owed;

  std::uint64_t next() const { return last_ + 1; }
  std::uint64_t last() const { return last_; }
  // A forward: counted with the round that reduces it if it is in step and not paused.
  std::shared_ptr<ForwardFate> begin(bool in_step, bool paused);
  void add(const c10::intrusive_ptr<Sink>& sink) { sinks_.emplace_back(sink); }
  // A backward came by this sink; one that only adds (`syncs` false) takes its forward out.
  void visit(const Sink& sink, bool syncs);
  // Those that no backward has come by; of these forwards only, if they are given.
  std::vector<NodePtr> waiting(const std::set<std::uint64_t>* of = nullptr) const;
  // True if the running backward will come by one of them.
  bool comes_by_one() const;

  std::size_t count() const { return in_step_.size(); }  // in step, since the last round
  // Those whose outputs are gone and that no backward of this round has come to.
  void drop_unvisited(const std::set<std::uint64_t>& visited);
  // The first that an exception took away before its backward, if any.
  std::optional<std::uint64_t> unwound(const std::set<std::uint64_t>& visited) const;
  void close_round() { in_step_.clear(); }
  void drop_sinks() { sinks_.clear(); }

 private:
  std::uint64_t last_ = 0;  // numbers: 1, 2, ...
  std::map<std::uint64_t, std::shared_ptr<ForwardFate>> in_step_;
  std::vector<c10::weak_intrusive_ptr<Sink>> sinks_;
};

}  // namespace convoy
