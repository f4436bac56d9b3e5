#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/concat.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"

// What workers call in tests of several files.
namespace convoy::rpc::test {

at::Tensor rref_add(const at::Tensor& a, const at::Tensor& b);
int my_function(int a, int b, int c);
at::Tensor add_rref_to_value(const RRef<at::Tensor>& reference, const at::Tensor& value);
int add_to_reference(const RRef<int>& reference, int n);
// Two, to values of another worker.
std::vector<RRef<int>> nested_rrefs(const std::string& dst);

// Objects of which there may be only so many.
extern std::atomic<int> alive;
struct MyClass {
  explicit MyClass(int start) : a(start) { ++alive; }
  MyClass(MyClass&& other) noexcept : a(other.a) { ++alive; }
  ~MyClass() { --alive; }
  MyClass& operator=(MyClass&&) = delete;

  int my_instance_method(int b) const { return a + b; }
  int increment(int by) { return a += by; }
  int value() const { return a; }
  int slow_value() const;           // waits at rref_gate()
  int hidden() const { return a; }  // not exported
  Future<int> later(int b) const {
    const int sum = a + b;
    co_return sum;
  }
  void raise() const { throw std::runtime_error(convoy::concat("raised by ", a)); }
  RRef<int> as_reference() const { return current().session().rref(int(a)); }

  int a;
};

// What handlers of this process wait for.
struct RRefGate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int waiting = 0;

  void wait();
  void set(bool value);
  bool is_waited_at();
};
RRefGate& rref_gate();
// Waits there, and returns that.
int slow_function(int n);

// The name of the next worker.
std::string next_of(const Session& session);

}  // namespace convoy::rpc::test
