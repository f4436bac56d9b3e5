#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

// What the sides of bench/endpoint.py have in common: how round trips and letters are timed.
namespace bench {

using Clock = std::chrono::steady_clock;

inline double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline void print(const std::string& name, double value) {
  std::printf("%s %.9g\n", name.c_str(), value);
  std::fflush(stdout);
}

constexpr int kWarmUp = 2000;
constexpr int kTrips = 30'000;
constexpr int kSleeps = 150;
constexpr int kLetters = 400'000;
constexpr int kOutstanding = 64;

// call() sends a letter and returns when the answer is there.
template <class Call>
void time_round_trips(Call call) {
  for (int i = 0; i < kWarmUp; ++i) call();
  std::vector<double> busy;
  for (int i = 0; i < kTrips; ++i) {
    const auto start = Clock::now();
    call();
    busy.push_back(since(start));
  }
  print("round_trip_s", median(busy));
  // Long enough for everybody to sleep.
  std::vector<double> asleep;
  for (int i = 0; i < kSleeps; ++i) {
    ::usleep(3000);
    const auto start = Clock::now();
    call();
    asleep.push_back(since(start));
  }
  print("asleep_s", median(asleep));
}

// send() and then take(), which waits for at least one answer and returns how many came.
template <class Send, class Take>
void time_letters(int letters, Send send, Take take) {
  const auto run = [&](int count) {
    int sent = 0;
    int got = 0;
    while (got < count) {
      while (sent < count && sent - got < kOutstanding) {
        send();
        ++sent;
      }
      got += take();
    }
  };
  run(letters / 10);
  const auto start = Clock::now();
  run(letters);
  print("letters_per_s", letters / since(start));
}

}  // namespace bench
