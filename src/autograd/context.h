#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/walk.h"
#include "autograd/wire.h"
#include "rpc/recording.h"

namespace convoy::autograd::detail {

class Registry;
class RecvNode;

// What a worker has of a context: the messages that it sent and got, and gradients. Made when it is
// first heard of, and dropped when it is released. Thread-safe.
class ContextState final : public rpc::detail::Recorder,
                           public std::enable_shared_from_this<ContextState> {
 public:
  ContextState(std::shared_ptr<Registry> registry, ContextId id);
  ~ContextState() override;

  ContextId id() const { return id_; }
  WorkerId creator() const { return static_cast<WorkerId>(id_ >> 48); }
  // kCancelled if the session has ended.
  Registry& registry() const { return *registry_; }
  bool released() const { return released_.load(); }

  // Recorder
  bool sends(std::uint32_t worker, const std::vector<at::Tensor>& tensors,
             std::string_view function, bool reply, rpc::detail::RecordTrailer& trailer) override;
  void forget(const rpc::detail::RecordTrailer& trailer) noexcept override;
  const void* session() const noexcept override;

  // A message came.
  void came(WorkerId from, std::uint64_t message, const std::vector<at::Tensor>& tensors,
            std::string_view function, bool reply);

  // nullptr: there is none of this number.
  std::shared_ptr<const SentMessage> sent(std::uint64_t message) const;
  std::vector<std::shared_ptr<const SentMessage>> all_sent() const;
  // False: it is released.
  bool know(WorkerId worker);
  bool was_introduced_by(WorkerId worker) const;

  // Adds what a pass has computed.
  void add(std::vector<std::pair<at::Tensor, at::Tensor>>&& gradients);
  std::vector<Gradients::Item> gradients() const;
  // From now on nothing is recorded; what it holds is let go of. Whom it was sent to.
  std::vector<WorkerId> release();
  ContextReport report() const;

 private:
  struct Came {
    std::uint64_t message;
    WorkerId from;
    std::string_view function;
    bool reply;
    std::uint32_t tensors;
  };
  struct Gradient {
    at::Tensor leaf;
    at::Tensor value;
  };

  const std::shared_ptr<Registry> registry_;
  const ContextId id_;
  std::atomic<bool> released_{false};
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::unordered_map<std::uint64_t, std::shared_ptr<const SentMessage>> sent_;
  std::vector<Came> came_;
  std::set<WorkerId> known_;
  std::set<WorkerId> introduced_by_;
  std::unordered_map<const c10::TensorImpl*, Gradient> gradients_;
};

}  // namespace convoy::autograd::detail
