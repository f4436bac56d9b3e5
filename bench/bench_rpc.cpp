// Calls of functions with tensors: one round of every case of calls.h, as a line of JSON.
//
//   bench_rpc convoy [quick]    two workers of a session
//   bench_rpc local [quick]     the function of small calls without a call; and with what any call
//                               does: two tensors made of bytes for it, one of its result's
//   bench_rpc memcpy [quick]    the limit of large tensors: two copies within warm huge pages
//   bench_rpc cores [quick]     the same, the second copy by another core
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "calls.h"
#include "convoy/rpc.h"
#include "os/wait.h"
#include "warm_memory.h"
#include "workers.h"

namespace bench {

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
at::Tensor echo(const at::Tensor& tensor) { return tensor; }
std::int64_t measure(const at::Tensor& tensor) { return tensor.numel(); }

CONVOY_RPC(add);
CONVOY_RPC(echo);
CONVOY_RPC(measure);

namespace {

using convoy::rpc::Future;
using convoy::rpc::Session;

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = 2});
}

class Client {
 public:
  explicit Client(const std::string& folder) : session_(join(folder, 0)) {}

  void call() { session_.rpc_sync<add>("worker1", a_, b_); }
  void start() { started_.push_back(session_.rpc_async<add>("worker1", a_, b_)); }
  void finish() {
    started_.front().wait();
    started_.pop_front();
  }
  void prepare_echo(std::size_t bytes) {
    large_ = at::ones({static_cast<std::int64_t>(bytes)}, at::kByte);
  }
  void echo() {
    const at::Tensor back = session_.rpc_sync<bench::echo>("worker1", large_);
    if (back.nbytes() != large_.nbytes()) std::abort();
  }
  void prepare_transfer() { prepare_echo(kTransferBytes); }
  void transfer() {
    if (session_.rpc_sync<measure>("worker1", large_) != large_.numel()) std::abort();
  }
  void shutdown() { session_.shutdown(); }

 private:
  Session session_;
  const at::Tensor a_ = at::ones({2}), b_ = at::ones({2});
  at::Tensor large_;
  std::deque<Future<at::Tensor>> started_;
};

void run_convoy(const CallBudget& budget) {
  const RunFolder folder("rpc");
  Workers server(folder, 2);
  {
    Client client(folder.path());
    measure_calls(client, budget);
    client.shutdown();
  }
  server.wait();
}

// A tensor of bytes that arrived, as anybody would make it.
at::Tensor tensor_of(const float (&values)[2]) {
  at::Tensor tensor = at::empty({2});
  std::memcpy(tensor.mutable_data_ptr(), values, sizeof values);
  return tensor;
}

void run_local(const CallBudget& budget) {
  constexpr int kTogether = 1000;
  const at::Tensor a = at::ones({2}), b = at::ones({2});
  const float values[2] = {1, 1};
  Medians medians;
  medians.add("call_tensors", repeat(budget, 300, [&] {
                const auto start = Clock::now();
                for (int i = 0; i < kTogether; ++i) {
                  float result[2];
                  const at::Tensor sum = bench::add(tensor_of(values), tensor_of(values));
                  std::memcpy(result, sum.const_data_ptr(), sizeof result);
                  tensor_of(result);
                }
                return microseconds_since(start) / kTogether;
              }));
  medians.add("call", repeat(budget, 300, [&] {
                const auto start = Clock::now();
                for (int i = 0; i < kTogether; ++i) bench::add(a, b);
                return microseconds_since(start) / kTogether;
              }));
  medians.print();
}

void run_memcpy(const CallBudget& budget) {
  Medians medians;
  for (const std::size_t bytes : kEchoBytes) {
    const WarmMemory from(bytes), there(bytes), back(bytes);
    medians.add(echo_name(bytes), repeat(budget, 300, [&] {
                  const auto start = Clock::now();
                  std::memcpy(there.data(), from.data(), bytes);
                  std::memcpy(back.data(), there.data(), bytes);
                  return microseconds_since(start);
                }));
  }
  medians.print();
}

// What one core has written costs another one more to read.
void run_cores(const CallBudget& budget) {
  Medians medians;
  for (const std::size_t bytes : kEchoBytes) {
    const WarmMemory from(bytes), there(bytes), back(bytes);
    std::atomic<int> turn{0};
    std::jthread other([&] {
      for (;;) {
        while (turn.load() == 0) convoy::cpu_relax();
        if (turn.load() == 2) return;
        std::memcpy(back.data(), there.data(), bytes);
        turn.store(0);
      }
    });
    medians.add(echo_name(bytes), repeat(budget, 300, [&] {
                  const auto start = Clock::now();
                  std::memcpy(there.data(), from.data(), bytes);
                  turn.store(1);
                  while (turn.load() != 0) convoy::cpu_relax();
                  return microseconds_since(start);
                }));
    turn.store(2);
  }
  medians.print();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  const std::string side = argc > 1 ? argv[1] : "";
  const CallBudget budget = CallBudget::from(argc > 2 ? argv[2] : "");
  if (side == "convoy") {
    run_convoy(budget);
  } else if (side == "local") {
    run_local(budget);
  } else if (side == "memcpy") {
    run_memcpy(budget);
  } else if (side == "cores") {
    run_cores(budget);
  } else if (side == "serve") {
    join(argv[2], 1).shutdown();
  } else {
    std::fprintf(stderr, "usage: bench_rpc convoy|local|memcpy|cores [quick]\n");
    return 2;
  }
  return 0;
}
