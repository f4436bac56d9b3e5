#pragma once

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "convoy/autograd.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

// What tests of distributed autograd have in common.
namespace convoy::autograd::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Future;
using rpc::Session;
using Tensors = std::vector<at::Tensor>;
using Way = std::vector<std::string>;  // from worker to worker

// What handlers and nodes of this process wait for.
class Signal {
 public:
  bool wait(std::chrono::milliseconds most = std::chrono::seconds(30)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, most, [&] { return on_; });
  }
  void set(bool to) {
    const std::lock_guard lock(mutex_);
    on_ = to;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool on_ = false;
};

// --- What workers call ---

at::Tensor mul(const at::Tensor& a, const at::Tensor& b);
at::Tensor square(const at::Tensor& t);
// Of the worker that is called.
bool has_context(ContextId id);
std::size_t count_contexts();
std::size_t count_passes();

// --- Sessions ---

// Each of n workers runs it, and nothing is left of contexts and passes then.
void run_all(int n, const std::function<void(Session&, int rank)>& function,
             const rpc::SessionOptions& more = {});
// worker0 of n runs it; the others only serve.
void run_root(int n, const std::function<void(Session&)>& function,
              const rpc::SessionOptions& more = {});

// --- Tensors ---

at::Tensor leaf(double value = 1, at::IntArrayRef sizes = {3, 3});
at::Tensor random_leaf(at::IntArrayRef sizes = {3, 3});
void expect_close(const at::Tensor& got, const at::Tensor& wanted);

}  // namespace convoy::autograd::test
