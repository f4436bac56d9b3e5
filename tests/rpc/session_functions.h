#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <mutex>
#include <string>

#include "convoy/rpc.h"

// What workers call in tests of several files.
namespace convoy::rpc::test {

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b);
// Throws std::invalid_argument.
void raise(const std::string& text);
int light();
// Calls itself on the next worker so often.
int descend(int depth);

// What handlers of this process wait for, in tests whose workers are threads.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int open = 0;

  void wait();
  void let_go();
};
Gate& gate();
void wait_at_gate();

// The rank of the next worker.
int next_of(const Session& session);
// All elements are that.
bool equal(const at::Tensor& t, double value);

}  // namespace convoy::rpc::test
