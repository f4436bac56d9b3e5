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

// Ranks that move tensors together: a value over any c10d::Backend. Copies are the same group,
// which ends with the last of them. Only its holders know it: torch's registry is not used.
//
// Collectives must be called in the same order on all ranks; methods are thread-safe, but threads
// that share a group must agree on that order. A call blocks until it is done; its _async form
// returns a Work. On backend "convoy" tensors may have any strides. Where a tensor is written,
// autograd sees a change in place. `where` is the line of the call, for events, flight records and
// error texts: leave it out. Errors are convoy::Error, and whatever a foreign backend throws;
// docs/reference/groups.md says what they leave behind.
class ProcessGroup {
 public:
  ProcessGroup() = default;  // no group: only bool and assignment may be used

  using Adopted = AdoptOptions;
  // A group on a backend that was made elsewhere: Gloo or NCCL from Python, a plugin, a test's own.
  static ProcessGroup from(c10::intrusive_ptr<c10d::Backend> backend, const Adopted& more = {});

  explicit operator bool() const { return impl_ != nullptr; }
  friend bool operator==(const ProcessGroup&, const ProcessGroup&) = default;  // the same group

  int rank() const;
  int size() const;
  const std::string& name() const;
  std::string backend_name() const;
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout) const;
  // Names of the hosts by rank. At the first call a collective, unless the backend is "convoy".
  const std::vector<std::string>& hosts() const;
  // This rank's number among the ranks of its host, and how many these are. As hosts().
  int local_rank() const;
  int local_size() const;
  // Whether its reductions take a Rounding: the ranks share memory, and nothing has to be encoded.
  bool can_round() const;

  // --- collectives ---
  // In place: tensor = op over all ranks.
  void all_reduce(const at::Tensor& tensor, const ReduceOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // Several tensors of one type in one pass.
  void all_reduce_coalesced(at::TensorList tensors, const ReduceOptions& options = {},
                            const CallSite& where = CallSite::current()) const;
  Work all_reduce_coalesced_async(at::TensorList tensors, const ReduceOptions& options = {},
                                  const CallSite& where = CallSite::current()) const;
  // Only the root's tensor becomes the result.
  void reduce(const at::Tensor& tensor, const RootReduceOptions& options = {},
              const CallSite& where = CallSite::current()) const;
  Work reduce_async(const at::Tensor& tensor, const RootReduceOptions& options = {},
                    const CallSite& where = CallSite::current()) const;
  void broadcast(const at::Tensor& tensor, const RootOptions& options = {},
                 const CallSite& where = CallSite::current()) const;
  Work broadcast_async(const at::Tensor& tensor, const RootOptions& options = {},
                       const CallSite& where = CallSite::current()) const;

  // output[r] = rank r's input. On "convoy" sizes may differ between ranks.
  void all_gather(at::TensorList outputs, const at::Tensor& input, const CallOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_gather_async(at::TensorList outputs, const at::Tensor& input,
                        const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // All ranks' inputs one after the other: output has size() times the elements. In place if input
  // is this rank's part of output. (Before torch 2.13: all_gather_into_tensor.)
  void all_gather_single(const at::Tensor& output, const at::Tensor& input,
                         const CallOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  Work all_gather_single_async(const at::Tensor& output, const at::Tensor& input,
                               const CallOptions& options = {},
                               const CallSite& where = CallSite::current()) const;
  // A new tensor (size(), input's sizes...).
  at::Tensor all_gather(const at::Tensor& input, const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // `outputs` is empty on others than the root, which gets rank r's input in outputs[r].
  void gather(at::TensorList outputs, const at::Tensor& input, const RootOptions& options = {},
              const CallSite& where = CallSite::current()) const;
  Work gather_async(at::TensorList outputs, const at::Tensor& input,
                    const RootOptions& options = {},
                    const CallSite& where = CallSite::current()) const;
  // `inputs` is empty on others than the root; rank r gets the root's inputs[r].
  void scatter(const at::Tensor& output, at::TensorList inputs, const RootOptions& options = {},
               const CallSite& where = CallSite::current()) const;
  Work scatter_async(const at::Tensor& output, at::TensorList inputs,
                     const RootOptions& options = {},
                     const CallSite& where = CallSite::current()) const;
  // output = op over all ranks of their inputs[this rank].
  void reduce_scatter(const at::Tensor& output, at::TensorList inputs,
                      const ReduceOptions& options = {},
                      const CallSite& where = CallSite::current()) const;
  Work reduce_scatter_async(const at::Tensor& output, at::TensorList inputs,
                            const ReduceOptions& options = {},
                            const CallSite& where = CallSite::current()) const;
  // The same of one input, which has size() times the elements of output. (Before torch 2.13:
  // reduce_scatter_tensor.)
  void reduce_scatter_single(const at::Tensor& output, const at::Tensor& input,
                             const ReduceOptions& options = {},
                             const CallSite& where = CallSite::current()) const;
  Work reduce_scatter_single_async(const at::Tensor& output, const at::Tensor& input,
                                   const ReduceOptions& options = {},
                                   const CallSite& where = CallSite::current()) const;
  // outputs[r] = rank r's inputs[this rank]. On "convoy" sizes may differ.
  void all_to_all(at::TensorList outputs, at::TensorList inputs, const CallOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  Work all_to_all_async(at::TensorList outputs, at::TensorList inputs,
                        const CallOptions& options = {},
                        const CallSite& where = CallSite::current()) const;
  // The same of two tensors that are cut along their first dimension.
  void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                         const SplitsOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                               const SplitsOptions& options = {},
                               const CallSite& where = CallSite::current()) const;

  void barrier(const CallOptions& options = {}, const CallSite& where = CallSite::current()) const;
  Work barrier_async(const CallOptions& options = {},
                     const CallSite& where = CallSite::current()) const;
  // A barrier that tells who is missing: at the deadline rank 0's error names every rank.
  void monitored_barrier(const CallOptions& options = {},
                         const CallSite& where = CallSite::current()) const;

  // --- messages ---
  // Messages with equal tags between two ranks arrive in order; nothing else is ordered. A send is
  // done when its tensor may be reused. recv returns the sender.
  void send(const at::Tensor& tensor, int target, const MessageOptions& options = {},
            const CallSite& where = CallSite::current()) const;
  Work send_async(const at::Tensor& tensor, int target, const MessageOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  int recv(const at::Tensor& tensor, int source = kAnySource, const MessageOptions& options = {},
           const CallSite& where = CallSite::current()) const;
  Work recv_async(const at::Tensor& tensor, int source = kAnySource,
                  const MessageOptions& options = {},
                  const CallSite& where = CallSite::current()) const;
  // Sends and receives with no order among each other, which cannot block each other:
  //   group.batch().send(a, 1).recv(b, 1).run();
  class Batch;
  Batch batch() const;

  // --- objects ---
  // Byte strings, whose lengths may differ between ranks. Nothing is pickled.
  template <ByteString Bytes>
  std::vector<Bytes> all_gather_object(const Bytes& mine, const CallOptions& options = {},
                                       const CallSite& where = CallSite::current()) const;
  // Empty on others than the root.
  template <ByteString Bytes>
  std::vector<Bytes> gather_object(const Bytes& mine, const RootOptions& options = {},
                                   const CallSite& where = CallSite::current()) const;
  // Returns the root's object; what other ranks pass is ignored.
  template <ByteString Bytes>
  Bytes broadcast_object(const Bytes& mine, const RootOptions& options = {},
                         const CallSite& where = CallSite::current()) const;
  // The root has one for each rank; others pass nothing.
  template <ByteString Bytes>
  Bytes scatter_object(const std::vector<Bytes>& all, const RootOptions& options = {},
                       const CallSite& where = CallSite::current()) const;
  template <ByteString Bytes>
  void send_object(const Bytes& object, int target, const MessageOptions& options = {},
                   const CallSite& where = CallSite::current()) const;
  template <ByteString Bytes = std::string>
  Bytes recv_object(int source, const MessageOptions& options = {},
                    const CallSite& where = CallSite::current()) const;

  // --- the group ---
  // A group of these ranks of this one, in that order; nullopt on a rank that is not among them.
  // Collective among those ranks; others need not call it (on other backends they must).
  std::optional<ProcessGroup> split(const std::vector<int>& ranks,
                                    const SplitOptions& options = {}) const;
  // One group for each colour, of the ranks that pass it, in the order of `key` and then of rank.
  // Collective.
  ProcessGroup split_by(int color, int key = 0, const SplitOptions& options = {}) const;

  // After deaths: a group of the surviving ranks, in the order of their ranks. Every survivor calls
  // it; they agree on who is left, even if more ranks die meanwhile. This group ends: its pending
  // operations fail on all ranks. Needs backend "convoy" and a store that lives on. kTimeout names
  // who did not come. When it returns no process outside of the new group can write into this one's
  // memory: docs/reference/groups.md.
  ProcessGroup shrink(const SplitOptions& options = {}) const;
  // The same with a given list of survivors. The processes of all other ranks are killed, so that
  // they cannot write into the survivors' memory later (ranks that are threads of a survivor's
  // process are not killed). To leave living ranks out, use split(). kPeerLost if one of them dies
  // on the way.
  ProcessGroup shrink(const std::vector<int>& survivors, const SplitOptions& options = {}) const;
  // Joins several groups that have only a store in common. Every rank of each group calls it;
  // `size` is the total number of ranks. Ranks keep the order of their groups; groups are ordered
  // by the arrival of their ranks 0. The old groups stay usable.
  ProcessGroup merge(const std::shared_ptr<Store>& meeting, int size,
                     const SplitOptions& options = {}) const;

  // A tensor in memory that all ranks of the host work on in place, if the backend has such memory;
  // an ordinary one otherwise. Not cleared.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  // Calls `callback` when an operation of this rank has ended, with or without an error: on the
  // thread that ended it, before waiters continue. It must not wait for the group; what it throws
  // is logged. Calls stop when the handle is removed or destroyed. kUnsupported unless the backend
  // is "convoy" or "mpi".
  EventHandle on_event(EventCallback callback) const;

  // A window on every rank's tensor, which must be of allocate() and contiguous; sizes and types
  // may differ. Collective. Only on backend "convoy": kUnsupported elsewhere.
  Window window(const at::Tensor& tensor, const CallOptions& options = {}) const;

  // Makes pending and later operations fail on every rank, if the backend can.
  void abort() const;
  // Leaves the group, without waiting for others; later operations fail.
  void shutdown() const;

  const c10::intrusive_ptr<c10d::Backend>& backend() const;
  // What split uses; may be nullptr.
  const std::shared_ptr<Store>& store() const;

  struct Impl;  // opaque

 private:
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& impl() const;

  // Shared by copies; the last of them leaves the group.
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy

#include "convoy/group_batch.h"  // IWYU pragma: export
