#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/frames.h"
#include "autograd/walk.h"
#include "autograd/wire.h"
#include "ddp/gradient_home.h"
#include "rpc/recording.h"

namespace convoy::autograd::detail {

class Registry;

// What a worker has of a context: the messages that it sent and got, and gradients. Made when it is
// first heard of, and dropped when it is released. Thread-safe.
class ContextState : public std::enable_shared_from_this<ContextState> {
 public:
  ContextState(std::shared_ptr<Registry> registry, ContextId id);
  ContextState(const ContextState&) = delete;
  ContextState& operator=(const ContextState&) = delete;
  ~ContextState();

  ContextId id() const { return id_; }
  WorkerId creator() const { return static_cast<WorkerId>(id_ >> 48); }
  // kCancelled if the session has ended.
  Registry& registry() const { return *registry_; }
  bool released() const { return released_.load(); }
  Origin origin() const;

  // Of threads that are no handlers.
  const std::shared_ptr<FramePlace>& place() const { return place_; }

  // What Recorder wants, for a frame.
  bool sends(const std::shared_ptr<FramePlace>& place, WorkerId worker,
             const std::vector<at::Tensor>& tensors, std::string_view function, bool reply,
             rpc::detail::RecordTrailer& trailer, rpc::detail::TrailerTail& tail);
  void forget(const rpc::detail::RecordTrailer& trailer) noexcept;
  void resumes(const std::shared_ptr<FramePlace>& place) noexcept;
  // A message came: where its handler is; nullptr for replies.
  std::shared_ptr<FramePlace> came(WorkerId from, std::uint64_t message,
                                   std::span<const std::byte> tail,
                                   const std::vector<at::Tensor>& tensors,
                                   std::string_view function, bool reply);

  // nullptr: there is none of this number.
  std::shared_ptr<const SentMessage> sent(std::uint64_t message) const;
  std::vector<std::shared_ptr<const SentMessage>> all_sent() const;
  // A pass whose nodes have numbers in the order of the program: they stay as long as it lives.
  class Ordered {
   public:
    explicit Ordered(std::shared_ptr<ContextState> context);
    Ordered(const Ordered&) = delete;
    Ordered& operator=(const Ordered&) = delete;
    ~Ordered();

    // Gives the walk's nodes their numbers; those of its sends.
    std::map<std::uint64_t, std::uint64_t> put_in_order(const Walk& walk);

   private:
    const std::shared_ptr<ContextState> context_;
  };
  // False: it is released.
  bool know(WorkerId worker);
  bool was_introduced_by(WorkerId worker) const;

  // kInvalidArgument if these cannot be added to what is there.
  void require_fitting(const std::vector<std::pair<at::Tensor, at::Tensor>>& gradients) const;
  // Adds what a pass has computed.
  void add(std::vector<std::pair<at::Tensor, at::Tensor>>&& gradients);
  std::vector<Gradients::Item> gradients() const;
  // As they will be when these were added.
  std::vector<Gradients::Item> gradients_with(
      const std::vector<std::pair<at::Tensor, at::Tensor>>& added) const;
  // What it has of a reducer's parameters, and what a pass has made of that.
  ContextGradients of_reducer(const std::shared_ptr<Reducer::Impl>& reducer) const;
  void replace(const std::shared_ptr<Reducer::Impl>& reducer, ContextGradients&& now);
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

  Lineage find_lineage(const std::vector<torch::autograd::Edge>& edges);

  const std::shared_ptr<Registry> registry_;
  const ContextId id_;
  const std::shared_ptr<FramePlace> place_;
  std::atomic<bool> released_{false};
  std::atomic<int> hopeless_{0};  // lineages that were given up in a row
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::unordered_map<std::uint64_t, std::shared_ptr<const SentMessage>> sent_;
  std::vector<Came> came_;
  FrameOrder order_;
  std::size_t ordered_ = 0;  // passes
  std::set<WorkerId> known_;
  std::set<WorkerId> introduced_by_;
  std::unordered_map<const c10::TensorImpl*, Gradient> gradients_;
  std::map<std::weak_ptr<Reducer::Impl>, std::vector<GradientHistory>, std::owner_less<>> reducers_;
};

// A context, as the calls of one handler see it, or those of threads that are none.
class FrameRecorder final : public rpc::detail::Recorder {
 public:
  FrameRecorder(std::shared_ptr<ContextState> context, std::shared_ptr<FramePlace> place)
      : context_(std::move(context)), place_(std::move(place)) {}

  bool sends(std::uint32_t worker, const std::vector<at::Tensor>& tensors,
             std::string_view function, bool reply, rpc::detail::RecordTrailer& trailer,
             rpc::detail::TrailerTail& tail) override {
    return context_->sends(place_, worker, tensors, function, reply, trailer, tail);
  }
  void forget(const rpc::detail::RecordTrailer& trailer) noexcept override {
    context_->forget(trailer);
  }
  void resumes() noexcept override { context_->resumes(place_); }
  const void* session() const noexcept override;

  // Every recorder is one of these.
  static const std::shared_ptr<ContextState>& context_of(const rpc::detail::Recorder& recorder) {
    return static_cast<const FrameRecorder&>(recorder).context_;
  }
  // For this thread's calls.
  static std::shared_ptr<FrameRecorder> of(std::shared_ptr<ContextState> context) {
    auto place = context->place();
    return std::make_shared<FrameRecorder>(std::move(context), std::move(place));
  }

 private:
  const std::shared_ptr<ContextState> context_;
  const std::shared_ptr<FramePlace> place_;
};

}  // namespace convoy::autograd::detail
