#pragma once

#include <atomic>
#include <map>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/call_scope.h"
#include "base/guarded.h"
#include "convoy/backend.h"
#include "convoy/group.h"
#include "os/fork_guard.h"

namespace convoy {

struct ProcessGroup::Impl {
  Impl(c10::intrusive_ptr<c10d::Backend> made, std::string title, std::shared_ptr<Store> keys,
       std::chrono::milliseconds limit);

  // Where everything that communicates begins: kUnsupported in a forked child, whatever the
  // backend.
  void check_process(std::string_view operation) const {
    if (!home.is_here()) [[unlikely]]
      fail_in_child(operation);
  }
  c10d::Backend& here(std::string_view operation) const {
    check_process(operation);
    return *backend;
  }
  [[noreturn]] void fail_in_child(std::string_view operation) const;
  // "all_reduce, group "world", rank 0 of 2: ".
  std::string head(std::string_view operation) const;
  // Calls function(backend). What our own backend throws is an Error that says where; others throw
  // what they throw.
  template <class Function>
  auto call(std::string_view operation, const Function& function) const {
    c10d::Backend& used = here(operation);
    try {
      return function(used);
    } catch (...) {
      rethrow_complete(operation);
    }
  }
  [[noreturn]] void rethrow_complete(std::string_view operation) const;

  const HomeProcess home;
  const c10::intrusive_ptr<c10d::Backend> backend;
  ConvoyBackend* const own;  // the same, if it is ours, over whatever
  // If its ranks are on one host and work on each other's memory: backend "convoy".
  bool shares_memory() const { return own && own->shares_memory(); }
  const std::string name;
  const std::shared_ptr<Store> store;
  std::atomic<std::chrono::milliseconds> timeout;

  struct Places {
    std::vector<std::string> hosts;
    int local_rank = 0;
    int local_size = 0;
  };
  Guarded<std::optional<Places>> places;
  // How often these ranks were split off under this name, so that each time has keys of its own.
  Guarded<std::map<std::pair<std::string, std::vector<int>>, int>> splits;
  std::atomic<int> shrinks{0};
};

// As c10d's operations take it, at least 1; 0: not set. kInvalidArgument for a duration that is not
// positive.
std::chrono::milliseconds in_milliseconds(const Timeout& timeout);

// "3,0,1".
std::string join_ranks(const std::vector<int>& ranks);
// kInvalidArgument unless they are ranks of a group of `size`, each once, at least one.
void check_ranks(const std::string& head, const std::vector<int>& ranks, int size);

// To be called for a tensor that an operation writes. Bytes that others write do not move
// autograd's counter: a tensor saved for backward would be changed behind its back.
inline void changes(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}
inline void changes(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) changes(tensor);
}

}  // namespace convoy
