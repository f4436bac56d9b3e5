#include "rpc/rref_functions.h"

#include <torch/torch.h>

#include <chrono>

namespace convoy::rpc::test {

using namespace std::chrono_literals;

at::Tensor rref_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(rref_add);

int my_function(int a, int b, int c) { return a + b + c; }
CONVOY_RPC(my_function);

at::Tensor add_rref_to_value(const RRef<at::Tensor>& reference, const at::Tensor& value) {
  return reference.to_here() + value;
}
CONVOY_RPC(add_rref_to_value);

int add_to_reference(const RRef<int>& reference, int n) { return reference.to_here() + n; }
CONVOY_RPC(add_to_reference);

std::vector<RRef<int>> nested_rrefs(const std::string& dst) {
  const auto session = current().session();
  return {session.remote<my_function>(dst, 1, 1, 0), session.remote<my_function>(dst, 1, 2, 0)};
}
CONVOY_RPC(nested_rrefs);

std::atomic<int> alive{0};

int MyClass::slow_value() const {
  rref_gate().wait();
  return a;
}

CONVOY_RPC(rpc::make<MyClass, int>);
CONVOY_RPC(&MyClass::my_instance_method);
CONVOY_RPC(&MyClass::increment);
CONVOY_RPC(&MyClass::value);
CONVOY_RPC(&MyClass::slow_value);
CONVOY_RPC(&MyClass::later);
CONVOY_RPC(&MyClass::raise);
CONVOY_RPC(&MyClass::as_reference);

void RRefGate::wait() {
  std::unique_lock lock(mutex);
  ++waiting;
  changed.notify_all();
  changed.wait_for(lock, 30s, [&] { return open; });
  --waiting;
}

void RRefGate::set(bool value) {
  const std::lock_guard lock(mutex);
  open = value;
  changed.notify_all();
}

bool RRefGate::is_waited_at() {
  const std::lock_guard lock(mutex);
  return waiting != 0;
}

RRefGate& rref_gate() {
  static RRefGate one;
  return one;
}

int slow_function(int n) {
  rref_gate().wait();
  return n;
}
CONVOY_RPC(slow_function);

std::string next_of(const Session& session) {
  return convoy::concat("worker", (session.worker_info().rank + 1) % session.size());
}

}  // namespace convoy::rpc::test
