#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "convoy/call_site.h"
#include "convoy/group.h"
#include "convoy/work.h"

namespace convoy {

// Sends and receives that are started together: see ProcessGroup::batch().
class ProcessGroup::Batch {
 public:
  Batch& send(const at::Tensor& tensor, int target, int tag = 0);
  Batch& recv(const at::Tensor& tensor, int source, int tag = 0);
  // Starts what was collected, and empties the batch.
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
