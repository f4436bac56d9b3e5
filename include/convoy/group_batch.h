#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "convoy/call_site.h"
#include "convoy/group.h"
#include "convoy/work.h"

namespace convoy {

// Sends and receives that start together: see ProcessGroup::batch(). Not thread-safe.
class ProcessGroup::Batch {
 public:
  // Adds a message. Nothing is sent yet; arguments are checked by run() and start().
  Batch& send(const at::Tensor& tensor, int target, int tag = 0);
  Batch& recv(const at::Tensor& tensor, int source, int tag = 0);
  // Starts the collected messages, and empties the batch. run() blocks until all are done, start()
  // returns a Work. Throws kInvalidArgument for a bad tensor or rank. The timeout is that of the
  // group.
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
