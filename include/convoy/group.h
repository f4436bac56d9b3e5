#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/call_site.h"
#include "convoy/event.h"
#include "convoy/reduce_op.h"
#include "convoy/store.h"
#include "convoy/work.h"

namespace c10d {
class Backend;
}

namespace convoy {

class Window;

// Options of single calls. A timeout of 0 is the group's own.
struct CallOptions {
  std::chrono::milliseconds timeout{0};
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // of kPremulSum
  std::chrono::milliseconds timeout{0};
  Rounding rounding = Rounding::kNone;  // kUnsupported unless ranks share memory, see can_round()
};
struct RootOptions {
  int root = 0;
  std::chrono::milliseconds timeout{0};
};
struct RootReduceOptions {
  int root = 0;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;
  std::chrono::milliseconds timeout{0};
};
struct SplitsOptions {
  std::vector<std::int64_t> output_splits = {};  // rows by rank; empty: equal parts
  std::vector<std::int64_t> input_splits = {};
  std::chrono::milliseconds timeout{0};
};
struct MessageOptions {
  int tag = 0;
  std::chrono::milliseconds timeout{0};
};
struct SplitOptions {
  std::string name = {};                 // empty: made from the parent's
  std::chrono::milliseconds timeout{0};  // of the new group's operations; 0: the parent's
};

inline constexpr int kAnySource = -1;

// What the object collectives take and give.
template <class T>
concept ByteString = std::same_as<T, std::string> || std::same_as<T, std::vector<std::byte>> ||
                     std::same_as<T, std::vector<std::uint8_t>>;

// Ranks that move tensors together: a value over any c10d::Backend. Copies are the same group,
// which ends with the last of them. Known to nobody but its holders: torch's global registry is not
// used.
//
// Collectives must be called in the same order on all ranks; methods may be called from any thread,
// but then it is the callers who keep that order. A call returns when it is done, its _async form
// returns a Work. On backend "convoy" tensors may have any strides. Where a tensor is written,
// autograd sees a change in place. `where` is for events, records and messages: never written, it
// is the line of the call. Errors are convoy::Error, and whatever a foreign backend throws;
// docs/groups.md tells what they leave behind.
class ProcessGroup {
 public:
  ProcessGroup() = default;  // no group: nothing but bool and assignment may be used

  struct Adopted {
    std::string name = {};                   // empty: the backend's group name
    std::shared_ptr<Store> store = nullptr;  // for split and split_by, with fresh keys
    std::chrono::milliseconds timeout{0};    // 0: the backend's
  };
  // A group on a backend that was made elsewhere: Gloo or NCCL from Python, a plugin, a test's own.
  static ProcessGroup from(c10::intrusive_ptr<c10d::Backend> backend, const Adopted& more);
  static ProcessGroup from(c10::intrusive_ptr<c10d::Backend> backend);

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
  // Of equal tags between two ranks in order; nothing else is ordered. A send is done when its
  // tensor may be used again. recv returns the sender.
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
  // Bytes of any number, which differs between ranks. No pickle: what they mean is the caller's.
  template <ByteString Bytes>
  std::vector<Bytes> all_gather_object(const Bytes& mine, const CallOptions& options = {},
                                       const CallSite& where = CallSite::current()) const;
  // Empty on others than the root.
  template <ByteString Bytes>
  std::vector<Bytes> gather_object(const Bytes& mine, const RootOptions& options = {},
                                   const CallSite& where = CallSite::current()) const;
  // The root's; what others pass is not used.
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

  // After deaths: a group of those who live, in the order of their ranks. Collective among them:
  // every one calls it, and they agree on who is left, also if more die meanwhile. This group ends:
  // what is pending in it fails everywhere. Needs backend "convoy" and a store that lives on.
  // kTimeout names who did not come. When it returns no process outside of the new group can write
  // into this one's memory: docs/groups.md.
  ProcessGroup shrink(const SplitOptions& options = {}) const;
  // The same for ranks that the caller knows, and without asking who lives: the processes of the
  // others are killed, lest they write into the survivors' memory later (threads of a survivor's
  // process are not). To leave ranks out alive, use split(). kPeerLost if one of them dies on the
  // way.
  ProcessGroup shrink(const std::vector<int>& survivors, const SplitOptions& options = {}) const;
  // One group of several that share nothing but a store: every rank of each calls it, with how many
  // they are together. Ranks follow each other as in their groups; groups in the order in which
  // their ranks 0 come. The old groups go on.
  ProcessGroup merge(const std::shared_ptr<Store>& meeting, int size,
                     const SplitOptions& options = {}) const;

  // A tensor in memory that all ranks of the host work on in place, if the backend has such memory;
  // an ordinary one otherwise. Not cleared.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  // Calls `callback` when an operation of this rank has ended, well or not, on the thread that
  // ended it and before anybody who waits for it goes on. It must not wait for the group; what it
  // throws is logged. Until the handle is removed or destroyed. kUnsupported unless the backend is
  // "convoy" or "mpi".
  EventHandle on_event(EventCallback callback) const;

  // A window on every rank's tensor, which must be of allocate() and contiguous; sizes and types
  // may differ. Collective. Only on backend "convoy": kUnsupported elsewhere.
  Window window(const at::Tensor& tensor, const CallOptions& options = {}) const;

  // Pending and later operations fail on every rank, if the backend can.
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

class ProcessGroup::Batch {
 public:
  Batch& send(const at::Tensor& tensor, int target, int tag = 0);
  Batch& recv(const at::Tensor& tensor, int source, int tag = 0);
  // Starts what was collected, and empties the batch.
  void run(const CallSite& where = CallSite::current());
  Work start(const CallSite& where = CallSite::current());

 private:
  friend class ProcessGroup;
  struct Item {
    bool sends;
    at::Tensor tensor;
    int peer;
    int tag;
  };
  explicit Batch(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<Impl> impl_;
  std::vector<Item> items_;
};

}  // namespace convoy
