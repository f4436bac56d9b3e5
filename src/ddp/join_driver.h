#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "convoy/join.h"
#include "convoy/reducer.h"

namespace convoy {

// What a Join adds to rounds.
struct JoinPort {
  std::function<JoinStep()> announce;           // tells the ranks without inputs
  std::function<void(const JoinStep&)> finish;  // after a good round, on all ranks
  std::function<bool()> defers;  // others announce during backward: rounds begin at its end
  bool divides_by_live = false;
  bool is_part = false;  // of a Join that somebody else conducts
};

// A reducer's side of a Join, or of none. Invariants: a rank with inputs announces each round once;
// one that shadows announces none, and adds nothing but what it has not reduced yet.
class JoinDriver {
 public:
  bool is_active() const { return port_ != nullptr; }
  bool is_part() const { return port_ && port_->is_part; }
  bool divides_by_live() const { return port_ && port_->divides_by_live; }
  bool defers() const { return port_ && port_->defers(); }
  bool shadows() const { return shadows_; }
  void set(std::unique_ptr<JoinPort> port) { port_ = std::move(port); }

  void open_round() { announced_ = false; }
  // Throws what announcing throws.
  void announce() {
    if (!port_ || shadows_ || std::exchange(announced_, true)) return;
    step_ = port_->announce();
  }
  void finish() const {
    if (port_) port_->finish(step_);
  }
  // The rank whose word counts: the first that has inputs.
  int speaker() const { return port_ && !step_.live.empty() ? step_.live.front() : 0; }
  // Of means over `size` ranks.
  double scale(const GradReduce& reduce, int size) const {
    if (!divides_by_live() || reduce.kind() != GradReduce::Kind::kMean) return 1;
    return static_cast<double>(size) / static_cast<double>(step_.live.size());
  }

  // While one lives, this rank has no inputs, and the others make this step.
  class Shadow {
   public:
    Shadow(JoinDriver& driver, const JoinStep& step) : driver_(driver) {
      driver_.step_ = step;
      driver_.shadows_ = true;
    }
    Shadow(const Shadow&) = delete;
    Shadow& operator=(const Shadow&) = delete;
    ~Shadow() { driver_.shadows_ = false; }

   private:
    JoinDriver& driver_;
  };

 private:
  std::unique_ptr<JoinPort> port_;
  JoinStep step_;  // of this round
  bool announced_ = false;
  bool shadows_ = false;
};

}  // namespace convoy
