#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "base/guarded.h"
#include "coll/group.h"
#include "convoy/backend.h"
#include "group/convoy_work.h"
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

inline std::size_t count_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

// The state of a ConvoyBackend, and how it carries out one operation.
class ConvoyBackend::Impl {
 public:
  Impl(const std::shared_ptr<Store>& store, int rank, int size,
       c10::intrusive_ptr<Options> options);

  coll::Group& group() { return *group_; }
  const Options& options() const { return *options_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::uint64_t number() const { return number_; }
  Completions& completions() { return *completions_; }

  std::chrono::nanoseconds timeout(std::chrono::milliseconds asked) const {
    return asked == c10d::kUnsetTimeout ? timeout_.load() : asked;
  }
  coll::CallOptions call(std::chrono::milliseconds asked) const {
    return {.timeout = timeout(asked)};
  }
  coll::ReduceOptions call(const c10d::ReduceOp& op, std::chrono::milliseconds asked) const;

  // An operation on tensors: start(group, callback) issues it on packed memory; at its end results
  // are unpacked and `after` runs.
  struct Job {
    OpType op;
    const char* title;
    bool asynchronous;
    Tensors inputs;   // for profilers
    Tensors outputs;  // of the future
    std::shared_ptr<Packing> packing = std::make_shared<Packing>();
    std::function<void()> after = nullptr;

    // What is left to do when the bytes are there.
    void end() const {
      packing->unpack();
      if (!after) return;
      const at::AutoDispatchBelowAutograd guard;
      after();
    }
  };
  template <class Start>
  WorkPtr submit(Job job, const Start& start);
  // A message: a part of a batch while this thread coalesces.
  WorkPtr submit(Job job, const coll::Message& message, std::chrono::nanoseconds timeout);
  // An operation that is carried out by run(group) on this thread, without allocating; no Work.
  template <class Run>
  WorkPtr at_once(OpType op, const char* title, const at::Tensor& tensor, const Run& run);
  // True if a call may use at_once: it must not become part of something.
  bool alone(bool async) const { return !async && !coalescing(); }

  void start_coalescing();
  WorkPtr end_coalescing();
  void cancel_coalescing();

 private:
  struct Letter {
    coll::Message message;
    Job job;
    c10::intrusive_ptr<ConvoyWork> work;
  };
  struct Block {
    std::vector<Letter> letters;
    std::vector<WorkPtr> works;  // of collectives, which are issued at once
  };

  // True on the thread that has begun a block and not ended it.
  bool coalescing() const {
    return coalescing_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  c10::intrusive_ptr<ConvoyWork> make_work(const Job& job);
  Block take_block(const char* caller);
  WorkPtr send_batch(const std::vector<Letter>& letters);

  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  const std::shared_ptr<coll::Group> group_;
  // Shared with operations under way, which may outlive the backend.
  const std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();
  std::atomic<std::uint64_t> number_{0};  // of operations asked for
  // Set and read by the same thread where it matters; others only see that it is not theirs.
  std::atomic<std::thread::id> coalescing_thread_{};
  Guarded<Block> block_;
};

template <class Run>
WorkPtr ConvoyBackend::Impl::at_once(OpType op, const char* title, const at::Tensor& tensor,
                                     const Run& run) {
  const std::uint64_t number = ++number_;
  RECORD_FUNCTION(title, std::vector<c10::IValue>({tensor}));
  const auto start = Completions::Clock::now();
  run(*group_);
  completions_->tell(op, number, start);
  return nullptr;
}

template <class Start>
WorkPtr ConvoyBackend::Impl::submit(Job job, const Start& start) {
  if (alone(job.asynchronous)) {
    const std::uint64_t number = ++number_;
    RECORD_FUNCTION(job.title, std::vector<c10::IValue>(job.inputs.begin(), job.inputs.end()));
    const auto begin = Completions::Clock::now();
    start(*group_, nullptr).wait();
    job.end();
    completions_->tell(job.op, number, begin);
    return nullptr;
  }
  auto work = make_work(job);
  const auto done = [work, job = std::move(job)](const std::exception_ptr& error) {
    work->complete_after([&] { job.end(); }, error);
  };
  try {
    work->attach(start(*group_, done));
  } catch (...) {
    work->give_up();
    throw;
  }
  if (coalescing()) block_.lock()->works.push_back(work);
  return work;
}

}  // namespace convoy
