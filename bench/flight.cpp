// What the flight record costs an operation.
//
//   bench_flight           all figures
//   bench_flight barrier   one of them, for itself
//
// First the record alone, with its look at the clock. Then a barrier in a group of one rank, with
// and without a record (CONVOY_FLIGHT=off, in processes of their own, in turns): all that is left
// of an operation where nobody is waited for.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "base/call_scope.h"
#include "coll/group.h"
#include "convoy/store.h"
#include "os/flight_recorder.h"

namespace convoy {
namespace {

using Clock = std::chrono::steady_clock;

// Nanoseconds of one call: the best of many short rounds, which a busy machine disturbs least.
template <class Call>
double time_of(const Call& call) {
  constexpr int kCalls = 2000, kRounds = 300;
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    best = std::min(best, time.count() / kCalls);
  }
  return best;
}

double time_record() {
  flight::Recorder recorder(flight::make_memory("bench", 0));
  const auto group = recorder.add_group({.name = "world", .rank = 0, .size = 1, .processes = {}});
  const flight::Operation operation{.group = group,
                                    .number = 1,
                                    .name = flight::OperationText::pack("all_reduce"),
                                    .type = flight::TypeText::pack("f32"),
                                    .input = 2,
                                    .output = 2,
                                    .bytes = 8};
  const CallScope scope(CallSite::current());
  const auto called = Clock::now();  // the operation's own look, for its deadline
  return time_of([&] {
    const auto ticket = recorder.begin(operation, current_call_site(), called, true);
    recorder.end(ticket, flight::State::kCompleted, Clock::now());
  });
}

// A call, on the caller's side; the callee's is the same and one store more. The agent has the
// times anyway.
double time_call() {
  flight::Recorder recorder(flight::make_memory("bench", 0));
  const auto group = recorder.add_group({.name = "worker0",
                                         .rank = 0,
                                         .size = 2,
                                         .processes = {},
                                         .session = 1,
                                         .workers = {"worker0", "worker1"}});
  const auto function = recorder.text("train_step");
  const auto now = Clock::now();
  return time_of([&] {
    const auto ticket = recorder.begin_call(
        {.group = group, .number = 1, .function = function, .peer = 1}, now, true);
    recorder.end_call(ticket, flight::State::kCompleted, now);
  });
}

double time_barrier() {
  const auto group = coll::Group::create(make_local_store(), 0, 1, {});
  const CallScope scope(CallSite::current());
  return time_of([&] { group->barrier(); });
}

double time_in_child(const std::string& program, const char* setting) {
  const std::string command =
      std::string("CONVOY_FLIGHT=") + setting + " '" + program + "' barrier";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  double value = 0;
  if (!pipe || std::fscanf(pipe.get(), "%lf", &value) != 1) std::exit(1);
  return value;
}

}  // namespace
}  // namespace convoy

int main(int argc, char** argv) {
  using namespace convoy;
  if (argc == 2 && std::strcmp(argv[1], "barrier") == 0) {
    std::printf("%.2f\n", time_barrier());
    return 0;
  }
  std::printf("flight record alone: %.1f ns per operation (target: 100 ns)\n", time_record());
  std::printf("a call of RPC: %.1f ns on each side (target: 50 ns)\n", time_call());
  double with = 1e9, without = 1e9;
  for (int round = 0; round < 5; ++round) {
    with = std::min(with, time_in_child(argv[0], "on"));
    without = std::min(without, time_in_child(argv[0], "off"));
  }
  std::printf("barrier of one rank: %.1f ns with it, %.1f ns without: %.1f ns more\n", with,
              without, with - without);
}
