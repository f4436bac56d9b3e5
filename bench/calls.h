#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

// What the C++ sides of bench/rpc.py have in common: calls between two processes. A client calls, a
// server executes; the client measures and prints one line of JSON.
//
//   call                two tensors of 8 bytes in, one out, both sides busy
//   call_asleep         the same when both sides have slept since the one before
//   outstanding_64      time per call while 64 of them wait for their results
//   echo_1mb, ...       a tensor there and back, into an ordinary tensor
//   call_single         as `call`, each one timed
//   call_beside_1gb     the same while another thread sends 1 GB to the same server
namespace bench {

inline constexpr std::size_t kMegabyte = 1'000'000;
inline constexpr std::size_t kEchoBytes[] = {kMegabyte, 16 * kMegabyte, 100 * kMegabyte};
inline constexpr std::size_t kTransferBytes = 1000 * kMegabyte;
inline constexpr std::size_t kOutstandingCalls = 64;

using Clock = std::chrono::steady_clock;

inline double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// How long to measure. A slow side gets fewer repeats of what takes it long.
struct CallBudget {
  double seconds = 0.5;   // of each case
  bool transfer = true;   // with the 1 GB
  std::string only = {};  // this case; empty: all

  // Of the last words of a command: "quick", or a case.
  static CallBudget from(std::string_view word) {
    if (word == "quick") return {.seconds = 0.2, .transfer = false};
    return {.only = std::string(word)};
  }
  bool wants(std::string_view name) const { return only.empty() || only == name; }
};

class Medians {
 public:
  void add(const std::string& name, std::vector<double> times) {
    if (times.empty()) return;
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    char text[100];
    std::snprintf(text, sizeof text, "%s\"%s\": %.3f", line_.empty() ? "" : ", ", name.c_str(),
                  *middle);
    line_ += text;
  }
  void print() const { std::printf("{%s}\n", line_.c_str()); }

 private:
  std::string line_;
};

// Repeats until the budget is used, at least five times, at most `most`.
inline std::vector<double> repeat(const CallBudget& budget, std::size_t most,
                                  const std::function<double()>& once) {
  std::vector<double> times;
  const auto start = Clock::now();
  while (times.size() < most &&
         (times.size() < 5 || microseconds_since(start) < budget.seconds * 1e6)) {
    times.push_back(once());
  }
  return times;
}

inline std::string echo_name(std::size_t bytes) {
  return "echo_" + std::to_string(bytes / kMegabyte) + "mb";
}

template <class Client>
void measure_beside_transfer(Client& client, Medians& medians) {
  const auto single = [&] {
    const auto start = Clock::now();
    client.call();
    return microseconds_since(start);
  };
  client.prepare_transfer();
  client.transfer();
  std::vector<double> alone, beside;
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < 2000; ++i) alone.push_back(single());
    std::atomic<int> state{0};
    std::jthread other([&] {
      state.store(1);
      client.transfer();
      state.store(2);
    });
    while (state.load() == 0) std::this_thread::yield();
    while (state.load() == 1) beside.push_back(single());
  }
  medians.add("call_single", alone);
  medians.add("call_beside_1gb", beside);
}

// A client has: call(); start() and finish(), a call each that is begun and the oldest one ended;
// prepare_echo(bytes) and echo(); prepare_transfer() and transfer(), which returns when the server
// has had the 1 GB.
template <class Client>
void measure_calls(Client& client, const CallBudget& budget) {
  static constexpr int kTogether = 20;
  static constexpr int kInARow = 4'000;
  Medians medians;
  for (int i = 0; i < 200; ++i) client.call();  // warms up
  const auto measure = [&](const std::string& name, std::size_t most, auto once) {
    if (budget.wants(name)) medians.add(name, repeat(budget, most, once));
  };
  measure("call", 2000, [&] {
    const auto start = Clock::now();
    for (int i = 0; i < kTogether; ++i) client.call();
    return microseconds_since(start) / kTogether;
  });
  measure("call_asleep", 150, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const auto start = Clock::now();
    client.call();
    return microseconds_since(start);
  });
  measure("outstanding_64", 50, [&] {
    const auto start = Clock::now();
    for (std::size_t i = 0; i < kOutstandingCalls; ++i) client.start();
    for (std::size_t i = kOutstandingCalls; i < kInARow; ++i) {
      client.finish();
      client.start();
    }
    for (std::size_t i = 0; i < kOutstandingCalls; ++i) client.finish();
    return microseconds_since(start) / kInARow;
  });
  for (const std::size_t bytes : kEchoBytes) {
    if (!budget.wants(echo_name(bytes))) continue;
    client.prepare_echo(bytes);
    for (int i = 0; i < 3; ++i) client.echo();
    measure(echo_name(bytes), 300, [&] {
      const auto start = Clock::now();
      client.echo();
      return microseconds_since(start);
    });
  }
  if (budget.transfer && budget.wants("call_beside_1gb")) measure_beside_transfer(client, medians);
  medians.print();
}

}  // namespace bench
