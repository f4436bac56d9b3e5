#include "convoy/work.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/error.h"
#include "base/log.h"

namespace convoy {

Work::Work() = default;
Work::Work(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
Work::~Work() = default;
Work::Work(const Work&) = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(const Work&) = default;
Work& Work::operator=(Work&&) noexcept = default;

void Work::wait() const {
  if (work_ && !work_->wait()) fail(ErrorKind::kPeerLost, "the operation was aborted");
}

void Work::wait(const Deadline& deadline) const {
  if (deadline.is_never()) return wait();
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
  if (limit <= std::chrono::milliseconds::zero()) {
    // To c10d zero means "no limit".
    if (done()) return wait();
    fail(ErrorKind::kTimeout, "wait: Timed out; the operation goes on until its own deadline");
  }
  if (work_ && !work_->wait(limit)) fail(ErrorKind::kPeerLost, "the operation was aborted");
}

bool Work::done() const { return !work_ || work_->isCompleted(); }

std::exception_ptr Work::error() const { return work_ ? work_->exception() : nullptr; }

std::vector<at::Tensor> Work::result() const {
  return work_ ? work_->result() : std::vector<at::Tensor>();
}

int Work::source() const { return work_ ? work_->sourceRank() : -1; }

void Work::then(std::function<void(std::exception_ptr)> function) const {
  const auto run = [function = std::move(function)](const std::exception_ptr& error) {
    try {
      function(error);
    } catch (const std::exception& thrown) {
      log_warn("a function given to Work::then threw: ", thrown.what());
    } catch (...) {
      log_warn("a function given to Work::then threw something that is not a std::exception");
    }
  };
  if (!work_) return run(nullptr);
  work_->getFuture()->addCallback([run](c10::ivalue::Future& future) {
    run(future.hasError() ? future.exception_ptr() : nullptr);
  });
}

}  // namespace convoy
