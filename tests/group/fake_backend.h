#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/guarded.h"
#include "convoy/backend.h"

namespace convoy::test {

// Somebody else's backend: everything is asynchronous, on a thread of its own and in the order of
// the calls; its Work has no future; it has no options, no coalescing, no memory; tensors of lists
// must be of one size, as Gloo wants them. Ours carries the bytes.
class FakeBackend final : public c10d::Backend {
 public:
  explicit FakeBackend(c10::intrusive_ptr<ConvoyBackend> inner);
  ~FakeBackend() override;

  const std::string getBackendName() const override { return "fake"; }
  // Nothing begins until release().
  void hold() { queue_.lock()->held = true; }
  void release();

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr send(Tensors& tensors, int target, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

 private:
  class FakeWork final : public c10d::Work {
   public:
    explicit FakeWork(int rank) : Work(rank) {}
    void run(const std::function<int()>& operation);
    int sourceRank() const override { return source_; }

   private:
    int source_ = -1;
  };
  struct Queue {
    std::deque<std::function<void()>> jobs;
    bool held = false;
    bool closed = false;
  };

  // `operation` returns who sent, if that makes sense.
  WorkPtr enqueue(std::function<int()> operation);
  WorkPtr message(const std::function<WorkPtr()>& operation);
  void serve();

  const c10::intrusive_ptr<ConvoyBackend> inner_;
  Guarded<Queue> queue_;
  std::jthread thread_;
};

}  // namespace convoy::test
