#include "group/convoy_work.h"

#include <ATen/core/jit_type.h>

#include "base/error.h"
#include "base/log.h"

namespace convoy {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

FuturePtr make_tensors_future(bool nested = false) {
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (nested) type = c10::ListType::create(type);
  return c10::make_intrusive<c10::ivalue::Future>(type);
}

// `row` tensors in each list; 0: one list.
c10::IValue value_of(const std::vector<at::Tensor>& outputs, std::size_t row) {
  if (row == 0) return c10::IValue(outputs);
  std::vector<std::vector<at::Tensor>> lists;
  for (std::size_t i = 0; i < outputs.size(); i += row) {
    const auto begin = outputs.begin() + static_cast<std::ptrdiff_t>(i);
    lists.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(row));
  }
  return c10::IValue(lists);
}

// What users attached to the future runs here, and must not stop the group.
void settle(const FuturePtr& future, const std::exception_ptr& error, const c10::IValue& outputs) {
  try {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(outputs);
    }
  } catch (const std::exception& thrown) {
    log_warn("a callback of an operation's future threw: ", thrown.what());
  } catch (...) {
    log_warn("a callback of an operation's future threw something that is not a std::exception");
  }
}

c10d::WorkResult verdict(const c10::ivalue::Future& done) {
  if (!done.hasError()) return c10d::WorkResult::SUCCESS;
  try {
    std::rethrow_exception(done.exception_ptr());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return c10d::WorkResult::TIMEOUT;
  } catch (...) {
  }
  return c10d::WorkResult::COMM_ERROR;
}

}  // namespace

void Completions::set_hook(Hook hook) {
  state_.lock()->hook = std::make_shared<const Hook>(std::move(hook));
  hooked_.store(true, std::memory_order_release);
}

void Completions::begin() { ++state_.lock()->pending; }

void Completions::end() {
  --state_.lock()->pending;
  state_.notify();
}

void Completions::tell(c10d::OpType op, std::uint64_t number, Clock::time_point start) {
  if (!hooked_.load(std::memory_order_acquire)) return;
  const auto hook = state_.lock()->hook;
  const auto now = Clock::now();
  try {
    (*hook)(std::make_shared<c10d::WorkInfo>(op, number, start, now, now - start));
  } catch (const std::exception& thrown) {
    log_warn("a completion hook threw: ", thrown.what());
  } catch (...) {
    log_warn("a completion hook threw something that is not a std::exception");
  }
}

Completions::Told::Told(Completions& completions, const coll::Group& group, c10d::OpType op)
    : completions_(completions.hooked_.load(std::memory_order_acquire) ? &completions : nullptr),
      group_(&group),
      op_(op) {
  if (!completions_) return;
  before_ = group.last_issued();
  start_ = Clock::now();
}

Completions::Told::~Told() {
  if (!completions_) return;
  const std::uint64_t number = group_->last_issued();
  const bool message =
      op_ == c10d::OpType::SEND || op_ == c10d::OpType::RECV || op_ == c10d::OpType::RECVANYSOURCE;
  if (message || number != before_) completions_->tell(op_, message ? 0 : number, start_);
}

void Completions::wait_for_all() {
  auto state = state_.lock();
  state.wait(Deadline::never(), [&] { return state->pending == 0; });
}

ConvoyWork::ConvoyWork(const Description& what,
                       const std::optional<std::vector<at::Tensor>>& inputs,
                       std::vector<at::Tensor> outputs, std::shared_ptr<Completions> completions)
    : Work(what.rank, what.op, what.title, inputs),
      outputs_(std::move(outputs)),
      row_(what.row),
      future_(make_tensors_future(what.row != 0)),
      completions_(std::move(completions)),
      start_(Completions::Clock::now()),
      number_(what.number) {
  completions_->begin();
}

void ConvoyWork::attach(coll::Work work) {
  if (work.number() != 0) number_ = work.number();
  work_ = std::move(work);
}

void ConvoyWork::complete_after(const std::function<void()>& end, std::exception_ptr error) {
  if (ended_.exchange(true)) return;
  if (!error) {
    try {
      end();
    } catch (...) {
      error = std::current_exception();
    }
  }
  end_ = Completions::Clock::now();
  finish(error);
  settle(future_, error, value_of(outputs_, row_));
  completions_->tell(opType_, number_, start_);
  completions_->end();
}

void ConvoyWork::check_process(const char* operation) const {
  if (home_.is_here()) return;
  fail(ErrorKind::kUnsupported, operation,
       ": this process is a forked child of the rank that began the operation, and only the rank "
       "itself can wait for it or ask about it");
}

bool ConvoyWork::isCompleted() {
  check_process("isCompleted");
  return Work::isCompleted();
}

bool ConvoyWork::isSuccess() const {
  check_process("isSuccess");
  return Work::isSuccess();
}

std::exception_ptr ConvoyWork::exception() const {
  check_process("exception");
  return Work::exception();
}

FuturePtr ConvoyWork::getFuture() {
  check_process("getFuture");
  return future_;
}

bool ConvoyWork::wait(std::chrono::milliseconds timeout) {
  check_process("wait");
  if (!work_) {
    if (isCompleted()) return Work::wait(kNoTimeout);  // a block that was given up
    fail(ErrorKind::kInvalidArgument,
         "wait(): the operation is part of a coalescing block; end the block first");
  }
  // If it is its turn, it runs right here. Its error comes through complete_after().
  try {
    if (timeout == kNoTimeout) {
      work_->wait();
    } else if (!work_->wait(timeout)) {
      fail(ErrorKind::kTimeout, "wait of ", timeout.count(),
           " ms: Timed out waiting for the operation, which goes on until its own deadline");
    }
  } catch (const Error&) {
    if (!work_->done()) throw;
  }
  future_->wait();                // settled last: who has waited for one finds the other
  return Work::wait(kNoTimeout);  // the results are where they belong
}

void ConvoyWork::abort() {
  fail(ErrorKind::kUnsupported, "one operation cannot be aborted; abort its group");
}

int ConvoyWork::sourceRank() const {
  check_process("sourceRank");
  return work_ ? work_->source() : -1;
}

std::vector<at::Tensor> ConvoyWork::result() {
  if (!isCompleted()) {
    fail(ErrorKind::kInvalidArgument, "result(): the operation has not completed; wait for it");
  }
  return outputs_;
}

FuturePtr ConvoyWork::getFutureResult() {
  check_process("getFutureResult");
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  future_->addCallback([result](c10::ivalue::Future& done) {
    result->markCompleted(c10::IValue(static_cast<std::uint8_t>(verdict(done))));
  });
  return result;
}

float ConvoyWork::getDuration() const {
  if (!const_cast<ConvoyWork*>(this)->isCompleted()) {
    fail(ErrorKind::kInvalidArgument, "getDuration(): the operation has not completed");
  }
  return std::chrono::duration<float, std::milli>(end_ - start_).count();
}

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

FuturePtr CoalescedWork::getFuture() {
  auto together = make_tensors_future();
  if (works_.empty()) settle(together, nullptr, std::vector<at::Tensor>());
  // Not `this`: the futures may outlive it.
  auto left = std::make_shared<std::atomic<std::size_t>>(works_.size());
  for (const auto& one : works_) {
    one->getFuture()->addCallback([left, works = works_, together](auto&) {
      if (left->fetch_sub(1) != 1) return;
      std::exception_ptr error;
      std::vector<at::Tensor> all;
      for (const auto& work : works) {
        if (!work->isSuccess()) {
          error = work->exception();
          break;
        }
        try {
          const auto part = work->result();
          all.insert(all.end(), part.begin(), part.end());
        } catch (const std::exception&) {  // a foreign one need not have a result
        }
      }
      settle(together, error, all);
    });
  }
  return together;
}

bool CoalescedWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool CoalescedWork::isSuccess() const { return !exception(); }

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = Deadline::after(timeout);
  std::exception_ptr first;
  for (const auto& work : works_) {  // all: until then they use their tensors
    const bool limited = timeout != kNoTimeout;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    try {
      work->wait(limited ? std::max(left, std::chrono::milliseconds(1)) : kNoTimeout);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  synchronize();
  return true;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto part = work->result();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace convoy
