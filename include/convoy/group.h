#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convoy/call_site.h"
#include "convoy/event.h"
#include "convoy/group_options.h"
#include "convoy/store.h"
#include "convoy/work.h"

namespace c10d {
class Backend;
}

namespace convoy {

class Window;

// A set of ranks that exchange tensors, over any c10d::Backend. A value type: copies are the same
// group, and destroying the last one leaves it. It is not in torch's registry.
//
// All ranks must call the same collectives in the same order. Methods are thread-safe, but threads
// that share a group must agree on that order. A call blocks until it is done, at most for its
// timeout; its _async form returns a Work. On backend "convoy" tensors may have any strides.
// Autograd sees a written tensor as modified in place. `where` is the location of the call, for
// events, flight records and error texts: omit it. Calls throw convoy::Error: kInvalidArgument for
// bad arguments or ranks that disagree, kTimeout at the deadline, kPeerLost if a rank died,
// kUnsupported in a forked child. A foreign backend throws its own types. docs/reference/groups.md
// says what errors leave behind.
class ProcessGroup {
 public:
  ProcessGroup() = default;  // empty: all but bool and == throws kInvalidArgument

  using Adopted = AdoptOptions;
  // Wraps a backend that was made elsewhere: Gloo or NCCL from Python, a plugin, a test's own.
  static ProcessGroup from(c10::intrusive_ptr<c10d::Backend> backend, const Adopted& more = {});

  explicit operator bool() const { return impl_ != nullptr; }
  friend bool operator==(const ProcessGroup&, const ProcessGroup&) = default;  // the same group

  int rank() const;
  int size() const;
  const std::string& name() const;
  std::string backend_name() const;
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout) const;  // must be > 0
  // Host names by rank. The first call is collective, unless the backend is "convoy".
  const std::vector<std::string>& hosts() const;
  // Index of this rank among the ranks of its host, and their number. Collective as hosts().
  int local_rank() const;
  int local_size() const;
  // Whether reductions accept a Rounding: only if the ranks share memory (backend "convoy").
  bool can_round() const;

  // --- collectives ---
  // In place: tensor = op over all ranks.
  void all_reduce(const at::Tensor& tensor, const ReduceOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // Several tensors of one type in one operation.
  void all_reduce_coalesced(at::TensorList tensors, const ReduceOptions& options = {},
                            const CallSite& where = CallSite::current()) const;
  Work all_reduce_coalesced_async(at::TensorList tensors, const ReduceOptions& options = {},
                                  const CallSite& where = CallSite::current()) const;
  // Only the root's tensor receives the result.
  void reduce(const at::Tensor& tensor, const RootReduceOptions& options = {},
              const CallSite& where = CallSite::current()) const;
  Work reduce_async(const at::Tensor& tensor, const RootReduceOptions& options = {},
                    const CallSite& where = CallSite::current()) const;
  void broadcast(const at::Tensor& tensor, const RootOptions& options = {},
                 const CallSite& where = CallSite::current()) const;
  Work broadcast_async(const at::Tensor& tensor, const RootOptions& options = {},
                       const CallSite& where = CallSite::current()) const;

  // outputs[r] = rank r's input. On "convoy" sizes may differ between ranks.
  void all_gather(at::TensorList outputs, const at::Tensor& input, const CallOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_gather_async(at::TensorList outputs, const at::Tensor& input,
                        const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // Concatenates all ranks' inputs: output has size() times the elements. May be in place: input is
  // this rank's part of output. (Before torch 2.13: all_gather_into_tensor.)
  void all_gather_single(const at::Tensor& output, const at::Tensor& input,
                         const CallOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  Work all_gather_single_async(const at::Tensor& output, const at::Tensor& input,
                               const CallOptions& options = {},
                               const CallSite& where = CallSite::current()) const;
  // Returns a new tensor of shape (size(), input's sizes...).
  at::Tensor all_gather(const at::Tensor& input, const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // On the root outputs[r] = rank r's input. Other ranks pass an empty list.
  void gather(at::TensorList outputs, const at::Tensor& input, const RootOptions& options = {},
              const CallSite& where = CallSite::current()) const;
  Work gather_async(at::TensorList outputs, const at::Tensor& input,
                    const RootOptions& options = {},
                    const CallSite& where = CallSite::current()) const;
  // Rank r gets the root's inputs[r]. Other ranks pass an empty list.
  void scatter(const at::Tensor& output, at::TensorList inputs, const RootOptions& options = {},
               const CallSite& where = CallSite::current()) const;
  Work scatter_async(const at::Tensor& output, at::TensorList inputs,
                     const RootOptions& options = {},
                     const CallSite& where = CallSite::current()) const;
  // output = op over all ranks' inputs[rank()].
  void reduce_scatter(const at::Tensor& output, at::TensorList inputs,
                      const ReduceOptions& options = {},
                      const CallSite& where = CallSite::current()) const;
  Work reduce_scatter_async(const at::Tensor& output, at::TensorList inputs,
                            const ReduceOptions& options = {},
                            const CallSite& where = CallSite::current()) const;
  // The same with one input of size() times output's elements. (Before torch 2.13:
  // reduce_scatter_tensor.)
  void reduce_scatter_single(const at::Tensor& output, const at::Tensor& input,
                             const ReduceOptions& options = {},
                             const CallSite& where = CallSite::current()) const;
  Work reduce_scatter_single_async(const at::Tensor& output, const at::Tensor& input,
                                   const ReduceOptions& options = {},
                                   const CallSite& where = CallSite::current()) const;
  // outputs[r] = rank r's inputs[rank()]. On "convoy" sizes may differ.
  void all_to_all(at::TensorList outputs, at::TensorList inputs, const CallOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_to_all_async(at::TensorList outputs, at::TensorList inputs,
                        const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // The same with two tensors that are split along dimension 0.
  void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                         const SplitsOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                               const SplitsOptions& options = {},
                               const CallSite& where = CallSite::current()) const;

  void barrier(const CallOptions& options = {}, const CallSite& where = CallSite::current()) const;
  Work barrier_async(const CallOptions& options = {},
                     const CallSite& where = CallSite::current()) const;
  // A barrier that names missing ranks: at the deadline rank 0's kTimeout names all of them.
  void monitored_barrier(const CallOptions& options = {},
                         const CallSite& where = CallSite::current()) const;

  // Messages with the same tag between two ranks arrive in order; there is no other order. A send
  // is done when its tensor may be reused. recv returns the sender.
  void send(const at::Tensor& tensor, int target, const MessageOptions& options = {},
            const CallSite& where = CallSite::current()) const;
  Work send_async(const at::Tensor& tensor, int target, const MessageOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  int recv(const at::Tensor& tensor, int source = kAnySource, const MessageOptions& options = {},
           const CallSite& where = CallSite::current()) const;
  Work recv_async(const at::Tensor& tensor, int source = kAnySource,
                  const MessageOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  // Sends and receives that start together, in no order, and so cannot deadlock:
  //   group.batch().send(a, 1).recv(b, 1).run();
  class Batch;
  Batch batch() const;

  // --- objects ---
  // Byte strings, whose lengths may differ between ranks. Nothing is pickled.
  template <ByteString Bytes>
  std::vector<Bytes> all_gather_object(const Bytes& mine, const CallOptions& options = {},
                                       const CallSite& where = CallSite::current()) const;
  // Returns an empty list on other ranks than the root.
  template <ByteString Bytes>
  std::vector<Bytes> gather_object(const Bytes& mine, const RootOptions& options = {},
                                   const CallSite& where = CallSite::current()) const;
  // Returns the root's object. `mine` is ignored on other ranks.
  template <ByteString Bytes>
  Bytes broadcast_object(const Bytes& mine, const RootOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  // The root passes one object for each rank. `all` is ignored on other ranks.
  template <ByteString Bytes>
  Bytes scatter_object(const std::vector<Bytes>& all, const RootOptions& options = {},
                       const CallSite& where = CallSite::current()) const;
  template <ByteString Bytes>
  void send_object(const Bytes& object, int target, const MessageOptions& options = {},
                   const CallSite& where = CallSite::current()) const;
  template <ByteString Bytes = std::string>
  Bytes recv_object(int source, const MessageOptions& options = {},
                    const CallSite& where = CallSite::current()) const;

  // Makes a group of `ranks`, in that order. Returns nullopt on other ranks. Collective among
  // `ranks`. Other ranks need not call it on "convoy" and "mpi"; on other backends they must.
  std::optional<ProcessGroup> split(const std::vector<int>& ranks,
                                    const SplitOptions& options = {}) const;
  // Makes one group for each `color`, of the ranks that pass it, ordered by `key`, then rank.
  // Collective.
  ProcessGroup split_by(int color, int key = 0, const SplitOptions& options = {}) const;

  // After deaths: makes a group of the survivors, in the order of their ranks. Every survivor calls
  // it. They agree on who is left, even if more ranks die meanwhile. This group ends: its pending
  // operations fail on all ranks. Needs backend "convoy" and a store that survives. Throws kTimeout
  // naming living ranks that did not call it. After it returns, no process outside the new group
  // can write into this rank's memory: docs/reference/groups.md.
  ProcessGroup shrink(const SplitOptions& options = {}) const;
  // The same with a given list of survivors. Kills the processes of all other ranks, so that they
  // cannot write into the survivors' memory later (not ranks that are threads of a survivor's
  // process). To leave living ranks out, use split(). Throws kPeerLost if a survivor dies
  // meanwhile.
  ProcessGroup shrink(const std::vector<int>& survivors, const SplitOptions& options = {}) const;
  // Merges groups that have only a store in common. Every rank of each group calls it. `size` is
  // the total number of ranks. Groups are ordered by the arrival of their rank 0, ranks as before.
  // The old groups stay usable. Throws kUnsupported unless the backend is "convoy".
  ProcessGroup merge(const std::shared_ptr<Store>& meeting, int size,
                     const SplitOptions& options = {}) const;

  // Allocates a tensor in memory that all ranks of the host work on in place, if the backend has
  // such memory; otherwise an ordinary tensor. Not initialised.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  // Calls `callback` after each operation of this rank, also a failed one, on the thread that ended
  // it, before waiters continue. It must not wait for the group; its exceptions are logged. Calls
  // stop when the handle is removed or destroyed. Throws kUnsupported unless the backend is
  // "convoy" or "mpi".
  EventHandle on_event(EventCallback callback) const;

  // Makes a window on every rank's tensor, which must be contiguous and made by allocate(). Sizes
  // and types may differ. Collective. Throws kUnsupported unless the backend is "convoy".
  Window window(const at::Tensor& tensor, const CallOptions& options = {}) const;

  // Makes pending and later operations fail on every rank, if the backend can.
  void abort() const;
  // Leaves the group without waiting for other ranks. Later operations fail.
  void shutdown() const;

  const c10::intrusive_ptr<c10d::Backend>& backend() const;
  // The store that split() and shrink() use; may be nullptr.
  const std::shared_ptr<Store>& store() const;

  struct Impl;  // opaque

 private:
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& impl() const;

  // Shared by copies; the last copy leaves the group.
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy

#include "convoy/group_batch.h"  // IWYU pragma: export
