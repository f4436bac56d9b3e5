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

// An operation of a group that is under way. Its tensors must not be used until it is done. Copies
// are the same operation. All copies may be destroyed before it is done. Thread-safe. With backend
// "convoy" the methods throw kUnsupported in a forked child.
class [[nodiscard]] Work {
 public:
  Work();  // done, with no result
  // Wraps the Work of any backend. nullptr: done.
  explicit Work(c10::intrusive_ptr<c10d::Work> work);
  ~Work();
  Work(const Work&);
  Work(Work&&) noexcept;
  Work& operator=(const Work&);
  Work& operator=(Work&&) noexcept;

  // Blocks until it is done, at most until its own deadline, and rethrows its error. If the
  // operation is next and no thread runs it yet, it runs on this thread.
  void wait() const;
  // The same with a deadline of the caller: throws kTimeout if that passes first. The operation
  // goes on.
  void wait(const Deadline& deadline) const;
  // True when it has ended, with or without an error.
  bool done() const;
  // Its error. nullptr while it is under way and after success.
  std::exception_ptr error() const;
  // The tensors that hold the result. Throws kInvalidArgument before it is done.
  std::vector<at::Tensor> result() const;
  // The rank that sent the received message; -1 for a default Work.
  int source() const;
  // Calls `function` with the error, or with nullptr, when it is done: at once if it already is,
  // otherwise on the thread that finishes it. `function` must neither throw nor wait for the group.
  void then(std::function<void(std::exception_ptr)> function) const;

  // The Work of the backend; nullptr for a default Work.
  const c10::intrusive_ptr<c10d::Work>& c10d() const { return work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace convoy
