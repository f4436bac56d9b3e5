// References to values of other workers, between three processes: a line of JSON.
//
//   bench_rref [quick]
//
//   rref_life       a reference is made at one worker, passed to another, and deleted: each of 1000
//   number          a call that returns 8 bytes
//   to_here         the same by a reference
//   plain_forward   a call of a function that runs a small module
//   module_forward  RemoteModule::forward of that module
//   rref_bytes      memory that a live reference takes without its value, at its user
//   rref_bytes_owner  likewise, at its owner
#include <malloc.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "calls.h"
#include "convoy/remote_module.h"
#include "convoy/rpc.h"
#include "workers.h"

namespace bench {

constexpr int kReferences = 1000;

double number(double n) { return n; }
CONVOY_RPC(number);
void touch(const convoy::RRef<double>&) {}
CONVOY_RPC(touch);
std::size_t memory_here() { return ::mallinfo2().uordblks; }
CONVOY_RPC(memory_here);

struct SmallImpl : torch::nn::Module {
  SmallImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Small);
CONVOY_REMOTE_MODULE(Small);

at::Tensor run_small(const at::Tensor& x) {
  static Small module;
  return module->forward(x);
}
CONVOY_RPC(run_small);

namespace {

using convoy::RemoteModule;
using convoy::RRef;
using convoy::rpc::Future;
using convoy::rpc::Session;

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = 3});
}

void live_and_die(const Session& session) {
  std::vector<RRef<double>> references;
  std::vector<Future<void>> passed;
  references.reserve(kReferences);
  for (int i = 0; i < kReferences; ++i) references.push_back(session.remote<number>("worker1", 1));
  for (const auto& each : references) passed.push_back(session.rpc_async<touch>("worker2", each));
  convoy::rpc::wait_all(passed);
}

void measure_references(const Session& session, const CallBudget& budget) {
  constexpr int kTogether = 20;
  Medians medians;
  const at::Tensor x = at::ones({1, 2});
  const auto value = session.remote<number>("worker1", 1.0);
  const RemoteModule<Small> module(session, "worker1");
  const auto measure = [&](const std::string& name, const auto& once) {
    for (int i = 0; i < 200; ++i) once();
    medians.add(name, repeat(budget, 2000, [&] {
                  const auto start = Clock::now();
                  for (int i = 0; i < kTogether; ++i) once();
                  return microseconds_since(start) / kTogether;
                }));
  };
  // Twice, in turns: the machine is not the same all the time.
  measure("number", [&] { session.rpc_sync<number>("worker1", 1.0); });
  measure("to_here", [&] { static_cast<void>(value.to_here()); });
  measure("plain_forward", [&] { session.rpc_sync<run_small>("worker1", x); });
  measure("module_forward", [&] { module.forward(x); });
  live_and_die(session);
  medians.add("rref_life", repeat(budget, 50, [&] {
                const auto start = Clock::now();
                live_and_die(session);
                return microseconds_since(start) / kReferences;
              }));
  constexpr int kMany = 20'000;
  std::vector<RRef<double>> many;
  many.reserve(kMany);
  const auto there = session.rpc_sync<memory_here>("worker1");
  const auto here = memory_here();
  for (int i = 0; i < kMany; ++i) many.push_back(session.remote<number>("worker1", 1.0));
  for (const auto& each : many) each.created().wait();
  medians.add("rref_bytes", {static_cast<double>(memory_here() - here) / kMany});
  medians.add("rref_bytes_owner",
              {static_cast<double>(session.rpc_sync<memory_here>("worker1") - there) / kMany});
  medians.print();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  if (argc > 3 && std::string(argv[1]) == "serve") {
    join(argv[2], std::atoi(argv[3])).shutdown();
    return 0;
  }
  const RunFolder folder("rref");
  Workers others(folder, 3);
  {
    const Session session = join(folder.path(), 0);
    measure_references(session, CallBudget::from(argc > 1 ? argv[1] : ""));
    session.shutdown();
  }
  others.wait();
  return 0;
}
