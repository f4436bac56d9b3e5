#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/guarded.h"
#include "coll/group.h"

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
  // Until nothing is under way. Every operation has a deadline.
  void wait_for_all();

 private:
  struct State {
    std::size_t pending = 0;
    std::shared_ptr<const Hook> hook;
  };
  Guarded<State> state_;
  std::atomic<bool> hooked_{false};  // so that without a hook nothing is locked
};

// An operation of ConvoyBackend. Its future holds the outputs as a list of tensors.
class ConvoyWork final : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType op;
    const char* title;
    std::uint64_t number;
  };
  ConvoyWork(const Description& what, const std::optional<std::vector<at::Tensor>>& inputs,
             std::vector<at::Tensor> outputs, std::shared_ptr<Completions> completions);

  // Before it is handed out or, for a part of a batch, when the batch is issued: what carries it
  // out.
  void attach(coll::Work work) { work_ = std::move(work); }
  // Instead of attach: it never began.
  void give_up();
  // The end: `error`, or what end() throws, or success. Called once, from any thread.
  void complete_after(const std::function<void()>& end, std::exception_ptr error);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  void abort() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return number_; }

 private:
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const std::shared_ptr<Completions> completions_;
  const Completions::Clock::time_point start_;
  const std::uint64_t number_;
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
  void synchronize() override {}
  std::vector<at::Tensor> result() override;
  // Needs the futures of all of them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace convoy
