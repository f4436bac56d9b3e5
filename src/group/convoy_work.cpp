#include "group/convoy_work.h"

#include <ATen/core/jit_type.h>

#include "base/error.h"
#include "base/log.h"

namespace convoy {

ConvoyWork::ConvoyWork(int rank, c10d::OpType op, const char* title,
                       const std::optional<std::vector<at::Tensor>>& inputs,
                       std::vector<at::Tensor> outputs)
    : Work(rank, op, title, inputs),
      outputs_(std::move(outputs)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      start_(std::chrono::steady_clock::now()) {}

void ConvoyWork::attach(coll::Work work, std::uint64_t number) {
  work_ = std::move(work);
  number_ = number;
}

void ConvoyWork::complete(const std::exception_ptr& error) {
  end_ = std::chrono::steady_clock::now();
  finish(error);
  // What users attached to the future runs here, and must not stop the group.
  try {
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  } catch (const std::exception& thrown) {
    log_warn("a callback of an operation's future threw: ", thrown.what());
  }
}

bool ConvoyWork::wait(std::chrono::milliseconds timeout) {
  // If it is its turn, it runs right here. Its error comes through complete().
  try {
    if (timeout == kNoTimeout) {
      work_.wait();
    } else if (!work_.wait(timeout)) {
      fail(ErrorKind::kTimeout, "wait of ", timeout.count(),
           " ms: Timed out waiting for the operation, which goes on until its own deadline");
    }
  } catch (const Error&) {
    if (!work_.done()) throw;
  }
  return Work::wait(kNoTimeout);  // the results are where they belong
}

void ConvoyWork::abort() {
  fail(ErrorKind::kUnsupported, "one operation cannot be aborted; abort its group");
}

int ConvoyWork::sourceRank() const { return work_.source(); }

std::vector<at::Tensor> ConvoyWork::result() {
  if (!isCompleted()) {
    fail(ErrorKind::kInvalidArgument, "result(): the operation has not completed; wait for it");
  }
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> ConvoyWork::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  future_->addCallback([result](c10::ivalue::Future& done) {
    const auto value = done.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    result->markCompleted(c10::IValue(static_cast<std::uint8_t>(value)));
  });
  return result;
}

float ConvoyWork::getDuration() const {
  if (!const_cast<ConvoyWork*>(this)->isCompleted()) {
    fail(ErrorKind::kInvalidArgument, "getDuration(): the operation has not completed");
  }
  return std::chrono::duration<float, std::milli>(end_ - start_).count();
}

}  // namespace convoy
