#pragma once

#include <memory>

#include "ddp/reducer_impl.h"

namespace convoy {

// A reducer's part of a Join, while this exists. kInvalidArgument if it has a comm hook and the
// Join wants gradients divided in another way.
class ReducerInJoin {
 public:
  ReducerInJoin(std::shared_ptr<Reducer::Impl> impl, std::unique_ptr<JoinPort> port);
  // NOLINTNEXTLINE(bugprone-exception-escape): it throws only for a port
  ~ReducerInJoin() { impl_->set_join(nullptr); }
  ReducerInJoin(const ReducerInJoin&) = delete;
  ReducerInJoin& operator=(const ReducerInJoin&) = delete;

  // A round that waits for an output is an error now.
  void leave() const { impl_->before_forward(); }
  // For a rank without inputs. JoinStepFailed if the round fails, on all ranks.
  void shadow(const JoinStep& step);
  // In the end: gradients that only others' inputs have made are dropped. Who zeroes them after
  // each step does so no more for a rank whose loop has ended, and would add to them later.
  void finish() const;

 private:
  const std::shared_ptr<Reducer::Impl> impl_;
  bool shadowed_ = false;
};

}  // namespace convoy
