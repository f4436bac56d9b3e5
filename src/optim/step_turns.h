#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace convoy {

// Optimizers of this process whose parameters share memory take turns; others do not wait for each
// other. Thread-safe.
//
// A *circle* is what takes turns together: a lock. Optimizers that were apart come together when
// one is made that has parameters of both: one circle then joins the other, under the locks of
// both, and whoever comes to it goes on to that one.
class StepTurns {
 public:
  explicit StepTurns(const std::vector<at::Tensor>& parameters);
  ~StepTurns();
  StepTurns(const StepTurns&) = delete;
  StepTurns& operator=(const StepTurns&) = delete;

  // Waits for it.
  std::unique_lock<std::mutex> take() const;
  // Those of several sets at once, which may share memory.
  static std::vector<std::unique_lock<std::mutex>> take_all(
      const std::vector<const StepTurns*>& sets);

  struct Circle;  // opaque

 private:
  std::vector<const void*> storages_;
  std::shared_ptr<Circle> circle_;  // kept by all optimizers in it, and by circles that joined it
};

}  // namespace convoy
