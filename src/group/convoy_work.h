#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/guarded.h"
#include "coll/group.h"
#include "os/fork_guard.h"

namespace convoy {

// How many operations of a backend are under way, and who wants to hear of their ends. Thread-safe.
class Completions {
 public:
  using Clock = std::chrono::steady_clock;
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  void set_hook(Hook hook);
  void begin();
  void end();
  // Runs the hook; what it throws is logged.
  void tell(c10d::OpType op, std::uint64_t number, Clock::time_point start);
  // Until nothing is under way.
  void wait_for_all();

  // Tells of an operation that this thread carries out while it exists, however it ends, unless it
  // was refused.
  class Told {
   public:
    Told(Completions& completions, const coll::Group& group, c10d::OpType op);
    ~Told();
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;

   private:
    Completions* completions_;  // nullptr: nobody listens
    const coll::Group* group_;
    c10d::OpType op_;
    std::uint64_t before_ = 0;
    Clock::time_point start_;
  };

 private:
  struct State {
    std::size_t pending = 0;
    std::shared_ptr<const Hook> hook;
  };
  Guarded<State> state_;
  std::atomic<bool> hooked_{false};  // so that without a hook nothing is locked
};

// An operation of ConvoyBackend. Its future holds the outputs as a list of tensors, or of lists of
// `row` tensors each, as Gloo's does where an operation has several lists.
class ConvoyWork final : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType op;
    const char* title;
    std::uint64_t number;
    std::size_t row = 0;  // 0: one list
  };
  ConvoyWork(const Description& what, const std::optional<std::vector<at::Tensor>>& inputs,
             std::vector<at::Tensor> outputs, std::shared_ptr<Completions> completions);

  // Before it is handed out or, for a part of a batch, when the batch is issued: what carries it
  // out.
  void attach(coll::Work work);
  // The end: `error`, or what end() throws, or success. From any thread; only the first counts.
  void complete_after(const std::function<void()>& end, std::exception_ptr error);

  // Everything here throws kUnsupported in a forked child, where it would never end.
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return number_; }

 private:
  void check_process(const char* operation) const;

  const HomeProcess home_;
  const std::vector<at::Tensor> outputs_;
  const std::size_t row_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const std::shared_ptr<Completions> completions_;
  const Completions::Clock::time_point start_;
  std::atomic<std::uint64_t> number_;  // of a collective only sure when it is attached
  std::atomic<bool> ended_{false};
  Completions::Clock::time_point end_;  // before completed_ is set
  std::optional<coll::Work> work_;
};

// Several operations that were begun together and end together: done when all are.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  // Needs the futures of all of them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace convoy
