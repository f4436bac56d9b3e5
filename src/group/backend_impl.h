#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <atomic>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "base/guarded.h"
#include "coll/group.h"
#include "coll/medium.h"
#include "convoy/backend.h"
#include "group/convoy_work.h"
#include "os/fork_guard.h"
#include "tensor/elements.h"
#include "tensor/packing.h"

namespace convoy {

using c10d::OpType;
using coll::Piece;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Refuses with torch's own texts, which programs and tests know.
inline auto refuse_as(const char* operation) {
  return [operation](const std::string& text) {
    TORCH_CHECK_VALUE(false, "ConvoyBackend::", operation, ": ", text);
  };
}

// Contiguous, on the CPU, strided: worked on where it is.
inline bool is_simple(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.device().is_cpu() &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Of "convoy:all_reduce", for messages.
inline std::string_view name_of(const char* title) {
  return std::string_view(title).substr(std::string_view("convoy:").size());
}

inline std::size_t count_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

// The state of a ConvoyBackend, and how it carries out one operation.
class ConvoyBackend::Impl {
 public:
  Impl(std::shared_ptr<coll::Group> group, c10::intrusive_ptr<Options> options);

  coll::Group& group() { return *group_; }
  const std::shared_ptr<coll::Group>& shared_group() const { return group_; }
  bool is_here() const noexcept { return home_.is_here(); }
  const Options& options() const { return *options_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  c10::intrusive_ptr<Options> current_options() const;
  Completions& completions() { return *completions_; }

  // c10d says "unset" with -1; nothing at all is as good.
  std::chrono::nanoseconds timeout(std::chrono::milliseconds asked) const {
    if (asked == c10d::kUnsetTimeout || asked == std::chrono::milliseconds::zero()) return timeout_;
    TORCH_CHECK_VALUE(asked.count() > 0, "timeout must be > 0 ms, got ", asked.count(),
                      " (group \"", group_->name(), "\", rank ", group_->rank(), " of ",
                      group_->size(), ")");
    return asked;
  }
  coll::CallOptions call(std::chrono::milliseconds asked) const {
    return {.timeout = timeout(asked)};
  }
  coll::ReduceOptions call(const c10d::ReduceOp& op, std::chrono::milliseconds asked) const;

  // What other ranks' tensors are compared with; refers to the tensor.
  coll::Shape shape_of(const at::Tensor& tensor) const {
    return options_->compare_shapes ? coll::Shape::of(tensor.sizes()) : coll::Shape();
  }
  // The same call about a tensor.
  template <class Call>
  Call on(Call options, const at::Tensor& tensor) const {
    options.shape = shape_of(tensor);
    return options;
  }
  Piece with_shape(Piece piece, const at::Tensor& tensor) const {
    piece.shape = shape_of(tensor);
    return piece;
  }

  // An operation on tensors, carried out on packed memory; at its end results are unpacked and
  // `after` runs.
  struct Job {
    OpType op;
    const char* title;
    bool asynchronous;
    Tensors inputs;   // for profilers
    Tensors outputs;  // of the future
    std::shared_ptr<Packing> packing = std::make_shared<Packing>();
    std::function<void()> after = nullptr;
    std::size_t row = 0;  // the future has lists of so many outputs; 0: one list

    // What is left to do when the bytes are there; on any thread.
    void end() const {
      packing->unpack();
      if (!after) return;
      const at::AutoDispatchBelowADInplaceOrView guard;
      after();
    }
  };
  const coll::CallMaker& calls() const { return group_->calls(); }
  // Carried out on this thread if the caller waits for it and it is not part of a block.
  WorkPtr submit(Job job, coll::Call call);
  // A message, which is always issued: as a part of a batch while this thread coalesces.
  WorkPtr submit(Job job, const coll::Message& message, std::chrono::nanoseconds timeout);
  // An operation that is carried out by now(group) on this thread, without allocating; no Work.
  // `output` if it is another tensor.
  template <class Now>
  WorkPtr at_once(OpType op, const char* title, const at::Tensor& tensor, const Now& now,
                  const at::Tensor& output = {});
  WorkPtr at_once(OpType op, const char* title, const at::Tensor& tensor, coll::Call call,
                  const at::Tensor& output = {}) {
    return at_once(
        op, title, tensor, [&](coll::Group& group) { group.run(std::move(call)); }, output);
  }
  template <class Now>
  void message_now(OpType op, const char* title, const at::Tensor& tensor, Packing& packing,
                   const Now& now);
  // True if a call may use at_once: it must not become part of something.
  bool alone(bool async) const { return !async && !coalescing(); }

  void start_coalescing();
  WorkPtr end_coalescing();
  // Gives up the block of this thread, or of all.
  void cancel_coalescing();
  void cancel_all(const std::string& why);

  // After a failure: memory that the group may go on using must live as long as the process.
  static void keep_if_held(const coll::Medium& medium, std::shared_ptr<const void> memory);

 private:
  struct Letter {
    coll::Message message;
    Job job;
    c10::intrusive_ptr<ConvoyWork> work;
  };
  // What one thread has begun in a coalescing block.
  struct Block {
    std::vector<Letter> letters;
    std::vector<WorkPtr> works;  // of collectives, which are issued at once
  };
  using Blocks = std::map<std::thread::id, Block>;

  bool coalescing() const {
    // A block of this thread's own would show. In a forked child the lock may be held for ever.
    if (open_blocks_.load(std::memory_order_relaxed) == 0 || !home_.is_here()) return false;
    return blocks_.lock()->contains(std::this_thread::get_id());
  }
  // Runs use(block) if this thread has begun one; another thread's abort() may end it at any time.
  template <class Use>
  bool in_block(const Use& use) {
    if (open_blocks_.load(std::memory_order_relaxed) == 0) return false;
    auto blocks = blocks_.lock();
    const auto mine = blocks->find(std::this_thread::get_id());
    if (mine == blocks->end()) return false;
    use(mine->second);
    return true;
  }
  template <class Start>
  WorkPtr begin(Job job, std::uint64_t number, const Start& start);
  c10::intrusive_ptr<ConvoyWork> make_work(const Job& job, std::uint64_t number);
  Block take_block(const char* caller);
  static void give_up(const Block& block, const std::string& why);
  WorkPtr send_batch(const std::vector<Letter>& letters);

  const HomeProcess home_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  const std::shared_ptr<coll::Group> group_;
  // Shared with operations under way, which may outlive the backend.
  const std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();
  std::atomic<std::uint64_t> messages_{0};  // begun
  mutable Guarded<Blocks> blocks_;
  std::atomic<std::size_t> open_blocks_{0};  // of blocks_, so that without one nothing is locked
};

template <class Now>
WorkPtr ConvoyBackend::Impl::at_once(OpType op, const char* title, const at::Tensor& tensor,
                                     const Now& now, const at::Tensor& output) {
  group_->check_process(name_of(title));
  RECORD_FUNCTION(title, std::vector<c10::IValue>({tensor}));
  const Completions::Told told(*completions_, *group_, op);
  try {
    now(*group_);
  } catch (...) {
    keep_if_held(*group_->medium(), std::make_shared<Tensors>(Tensors{tensor, output}));
    throw;
  }
  return nullptr;
}

template <class Start>
WorkPtr ConvoyBackend::Impl::begin(Job job, std::uint64_t number, const Start& start) {
  auto work = make_work(job, number);
  // Not the group, which may end before its operations do.
  const auto done = [work, job = std::move(job),
                     medium = group_->medium()](const std::exception_ptr& error) {
    if (error) keep_if_held(*medium, job.packing);
    work->complete_after([&] { job.end(); }, error);
  };
  try {
    work->attach(start(*group_, done));
  } catch (...) {  // nothing was issued
    work->complete_after([] {}, std::current_exception());
    throw;
  }
  return work;
}

}  // namespace convoy
