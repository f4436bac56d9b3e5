#include "rpc/session_functions.h"

#include <torch/torch.h>

#include <chrono>
#include <stdexcept>

namespace convoy::rpc::test {

using namespace std::chrono_literals;

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);

void raise(const std::string& text) { throw std::invalid_argument(text); }
CONVOY_RPC(raise);

int light() { return 0; }
CONVOY_RPC(light);

int descend(int depth) {
  if (depth == 0) return 0;
  const auto session = current().session();
  return session.rpc_sync<descend>(next_of(session), depth - 1) + 1;
}
CONVOY_RPC(descend);

void Gate::wait() {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, 30s, [&] { return open > 0; });
}

void Gate::let_go() {
  const std::lock_guard lock(mutex);
  ++open;
  changed.notify_all();
}

Gate& gate() {
  static Gate one;
  return one;
}

void wait_at_gate() { gate().wait(); }
CONVOY_RPC(wait_at_gate);

int next_of(const Session& session) { return (session.worker_info().rank + 1) % session.size(); }

bool equal(const at::Tensor& t, double value) { return t.eq(value).all().item<bool>(); }

}  // namespace convoy::rpc::test
