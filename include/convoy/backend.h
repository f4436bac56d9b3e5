#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "convoy/event.h"
#include "convoy/store.h"

namespace convoy {

namespace coll {
class Group;  // opaque
}

// Collectives of the ranks of one host over shared memory, as a c10d::Backend: for torch's own
// ProcessGroup, and for programs that call it directly.
//
// Tensors may have any strides; what is not contiguous is copied. Tensors of allocateTensor() are
// worked on in place by all ranks. Operations run in the order of their calls, which must be the
// same on all ranks; sends and receives are apart from that order. Methods may be called from any
// thread. Errors are convoy::Error, and torch's own for bad arguments;
// docs/internals/collectives.md tells what they leave behind.
//
// It belongs to the process that made it: a forked child can destroy its copy, and everything else
// that communicates throws kUnsupported there.
//
// With asyncOp = false a call returns when it is done, and returns no Work (outside of coalescing
// blocks).
class ConvoyBackend : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds limit = kBackendDefaultTimeout)
        : c10d::Backend::Options("convoy", limit) {}

    int threads = 1;           // that work on one large operation of this rank
    bool read_private = true;  // large private tensors may be read out of the other process
    // Tensors of ranks that work together must have equal shapes, not only as many elements. Must
    // be the same on all ranks. By default true, unless CONVOY_COMPARE_SHAPES is 0.
    bool compare_shapes = compare_shapes_by_default();
    // Asked while the group is made, and forgotten then: ranks of it that have ended and how ("was
    // killed by ..."), if somebody knows. They are not waited for.
    std::function<std::map<int, std::string>()> ended = {};

   private:
    static bool compare_shapes_by_default();
  };

  // Collective: returns when all ranks have called it. The store's keys must be fresh.
  ConvoyBackend(const std::shared_ptr<Store>& store, int rank, int size,
                const c10::intrusive_ptr<Options>& options = c10::make_intrusive<Options>());
  // On a store of torch's.
  ConvoyBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                const c10::intrusive_ptr<Options>& options = c10::make_intrusive<Options>());
  ~ConvoyBackend() override;

  const std::string getBackendName() const override { return "convoy"; }
  // A copy: what is changed in it has no effect.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts = {}) override;
  // Sums. How many entries there are, and where, is exchanged before it returns, also with asyncOp.
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int target,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  // With a time-out of their own, which c10d's have not; source -1: anyone.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int target, int tag,
                                      std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag,
                                      std::chrono::milliseconds timeout);
  // The same, waiting; recv_now returns the sender. Not part of a coalescing block.
  void send_now(const at::Tensor& tensor, int target, int tag, std::chrono::milliseconds timeout);
  int recv_now(const at::Tensor& tensor, int source, int tag, std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts = {}) override;
  // Every rank enforces the deadline, rank 0 first, and names every missing rank, whatever
  // `wait_all` says: that only chooses between Gloo's two texts in front.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all = false) override;

  // Operations that this thread calls in between count as one: messages go as one batch, in no
  // order among each other, and forget whom they came from; the Work of the end is done when all
  // are. Each thread has a block of its own.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // Instead of the end: messages of the block are not sent, collectives that were begun go on.
  // abort() and shutdown() do it for all threads, a second start for this one.
  void cancel_coalescing();

  // Calls `callback` when an operation has ended, as ProcessGroup::on_event: as many as there are
  // handles, and with more to tell than c10d's hook.
  EventHandle on_event(EventCallback callback);
  // Called at the end of each operation, on the thread that ended it; must not wait for the group.
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  // Blocks until everything that was begun has ended: each has a deadline, but for messages of a
  // block that has not ended.
  void waitForPendingWorks() override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void enableCollectivesTiming() override {}

  // Collective among `ranks`; nullptr on a rank that is not one of them.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;

  // Memory that all ranks work on in place: a 1-D tensor.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long numel, at::TensorOptions options = {}) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // True: the ranks are on one host and work on each other's memory. False: a class made of this
  // one carries the same operations over something else.
  virtual bool shares_memory() const { return true; }
  // What carries its operations, for the library itself.
  coll::Group& group() const;

  // As its options say.
  bool compares_shapes() const;

  // Ranks whose processes are gone, as far as this one has heard.
  std::vector<int> lost_ranks() const;
  // For Options::ended of a group that is made of these ranks.
  std::function<std::map<int, std::string>()> ended_among(const std::vector<int>& ranks) const;

  // Pending and later operations fail on every rank.
  void abort() override;
  // The same; the errors of the other ranks say why.
  void abort_because(const std::string& why);
  // Leaves the group; does not wait for others.
  void shutdown() override;
  c10d::ErrorType getError() override;

 protected:
  // Over a group that was made otherwise.
  ConvoyBackend(std::shared_ptr<coll::Group> group, const c10::intrusive_ptr<Options>& options);
  // Makes the backend of a split or merge. For a language whose backends end in their own way.
  virtual c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store,
                                                 int rank, int size,
                                                 const c10::intrusive_ptr<Options>& options) const;

 private:
  class Impl;

  c10::intrusive_ptr<c10d::Backend> merge_with(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, int rank, int size,
      std::function<std::map<int, std::string>()> ended);

  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy
