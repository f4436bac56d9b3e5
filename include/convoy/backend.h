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

// Collectives over shared memory between ranks of one host, as a c10d::Backend: for torch's own
// ProcessGroup, and for programs that call it directly.
//
// Tensors may have any strides; non-contiguous ones are copied. Tensors of allocateTensor() are not
// copied: all ranks work on them in place. Collectives run in the order of the calls, which must be
// the same on all ranks. Sends and receives are not part of that order. Methods are thread-safe.
// They throw convoy::Error, and torch's errors for bad arguments; docs/internals/collectives.md
// says what an error leaves behind.
//
// The backend belongs to the process that made it. A forked child can destroy its copy; anything
// that communicates throws kUnsupported there.
//
// With asyncOp = false a call blocks until it is done, and returns no Work (except in a coalescing
// block).
class ConvoyBackend : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds limit = kBackendDefaultTimeout)
        : c10d::Backend::Options("convoy", limit) {}

    int threads = 1;           // threads that work on one large operation of this rank
    bool read_private = true;  // read large private tensors directly from the other process
    // Tensors that ranks combine must have equal shapes, not only equal numbers of elements. Must
    // be the same on all ranks. True by default, unless CONVOY_COMPARE_SHAPES is 0.
    bool compare_shapes = compare_shapes_by_default();
    // Optional. Called while the group is made, and dropped afterwards. Returns ranks of the group
    // that have ended and how ("was killed by ..."). The constructor does not wait for these ranks.
    std::function<std::map<int, std::string>()> ended = {};

   private:
    static bool compare_shapes_by_default();
  };

  // Collective. Blocks until all ranks have called it, at most for the timeout of the options. The
  // keys that it uses must not be in the store yet: give each group a prefix of its own.
  ConvoyBackend(const std::shared_ptr<Store>& store, int rank, int size,
                const c10::intrusive_ptr<Options>& options = c10::make_intrusive<Options>());
  // The same on a store of torch's.
  ConvoyBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                const c10::intrusive_ptr<Options>& options = c10::make_intrusive<Options>());
  ~ConvoyBackend() override;

  const std::string getBackendName() const override { return "convoy"; }
  // Returns a copy: changing it has no effect on the backend.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  // Timeout of later operations. Throws torch's ValueError if it is not positive.
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts = {}) override;
  // Sums sparse tensors. The number of entries and their indices are exchanged before the call
  // returns, also with asyncOp.
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
  // As c10d's send and recv, with a timeout for this call. Source -1: any rank.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int target, int tag,
                                      std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag,
                                      std::chrono::milliseconds timeout);
  // Blocking forms. recv_now returns the sender's rank. They are never part of a coalescing block.
  void send_now(const at::Tensor& tensor, int target, int tag, std::chrono::milliseconds timeout);
  int recv_now(const at::Tensor& tensor, int source, int tag, std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts = {}) override;
  // A barrier that names the missing ranks. Blocks, and throws kTimeout at the deadline. Rank 0
  // times out first and names every missing rank, whatever `wait_all` is: it only selects which of
  // Gloo's two texts the message starts with.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all = false) override;

  // A coalescing block: operations that this thread starts between startCoalescing() and
  // endCoalescing() count as one. Messages are sent as one batch, in no order, and their Works do
  // not tell the sender. The Work of endCoalescing() is done when all operations are. Each thread
  // has its own block.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // Ends the block without its messages, which are not sent. Collectives that were started go on.
  // abort() and shutdown() do this for all threads; a second startCoalescing() does it for its own
  // thread.
  void cancel_coalescing();

  // Registers a callback that is called when an operation ends: see ProcessGroup::on_event. Any
  // number may be registered. An Event has more details than c10d's hook below.
  EventHandle on_event(EventCallback callback);
  // Registers a hook that is called at the end of each operation, on the thread that ended it. It
  // must not wait for the group.
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  // Blocks until all started operations have ended. Each has a deadline, except messages in a
  // coalescing block that has not ended.
  void waitForPendingWorks() override;

  void setSequenceNumberForGroup() override {}
  // Number of the last collective that this rank has started.
  uint64_t getSequenceNumberForGroup() override;
  void enableCollectivesTiming() override {}

  // split(): collective among `ranks`; returns nullptr on other ranks. merge(): collective among
  // `size` ranks.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;

  // Allocates a 1-D tensor in memory that all ranks work on in place.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long numel, at::TensorOptions options = {}) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // True: the ranks are on one host and access each other's memory. False: a derived class carries
  // out the same operations over another medium.
  virtual bool shares_memory() const { return true; }
  // The group of the torch-free layer. For use inside the library.
  coll::Group& group() const;

  // The value of Options::compare_shapes.
  bool compares_shapes() const;

  // Ranks whose processes have ended, as far as this rank knows. Does not communicate.
  std::vector<int> lost_ranks() const;
  // A function for Options::ended of a new group of these ranks.
  std::function<std::map<int, std::string>()> ended_among(const std::vector<int>& ranks) const;

  // Makes pending and later operations fail on every rank.
  void abort() override;
  // The same. `why` is in the error text of the other ranks.
  void abort_because(const std::string& why);
  // Leaves the group without waiting for other ranks. Does nothing in a forked child.
  void shutdown() override;
  c10d::ErrorType getError() override;

 protected:
  // Wraps an existing group, for example over another medium.
  ConvoyBackend(std::shared_ptr<coll::Group> group, const c10::intrusive_ptr<Options>& options);
  // Makes the backend of a split or merge. Language bindings override it if their backends have
  // another lifetime.
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
