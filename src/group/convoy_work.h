#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "coll/group.h"
#include "tensor/packing.h"

namespace convoy {

// An operation of ConvoyBackend. Its future holds the outputs as a list of tensors.
class ConvoyWork final : public c10d::Work {
 public:
  ConvoyWork(int rank, c10d::OpType op, const char* title,
             const std::optional<std::vector<at::Tensor>>& inputs, std::vector<at::Tensor> outputs);

  // Before it is handed out: what carries it out, and its number.
  void attach(coll::Work work, std::uint64_t number);
  // The end: `error`, or success. Called once, from any thread.
  void complete(const std::exception_ptr& error);

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
  const std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point end_;  // before completed_ is set
  coll::Work work_;
  std::uint64_t number_ = 0;
};

}  // namespace convoy
