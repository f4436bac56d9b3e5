#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <functional>
#include <vector>

#include "convoy/deadline.h"

namespace c10d {
class Work;
}

namespace convoy {

// An operation of a group that is under way. Its tensors belong to it until it is done. Copies are
// the same operation; the last may go before it is done. Thread-safe.
class [[nodiscard]] Work {
 public:
  Work();  // done, with no result
  // Of any backend's; nullptr: done.
  explicit Work(c10::intrusive_ptr<c10d::Work> work);
  ~Work();
  Work(const Work&);
  Work(Work&&) noexcept;
  Work& operator=(const Work&);
  Work& operator=(Work&&) noexcept;

  // Blocks until it is done, at most until its own deadline, and rethrows its error. If it is its
  // turn and nobody runs it yet, it runs right here.
  void wait() const;
  // The same with a limit of the caller's: kTimeout if it passes first; the operation goes on.
  void wait(const Deadline& deadline) const;
  // True when it has ended, well or not.
  bool done() const;
  // Its error; nullptr while it is under way, and after success.
  std::exception_ptr error() const;
  // The tensors that hold the result; kInvalidArgument before it is done.
  std::vector<at::Tensor> result() const;
  // Who sent what was received.
  int source() const;
  // Calls `function` with the error or nullptr when it is done: at once if it already is, otherwise
  // on the thread that finishes it, where it must neither throw nor wait for the group.
  void then(std::function<void(std::exception_ptr)> function) const;

  // The backend's own; nullptr for a default Work.
  const c10::intrusive_ptr<c10d::Work>& c10d() const { return work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace convoy
