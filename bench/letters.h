#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

// What the sides of bench/endpoint.py have in common: letters between two processes. A client asks,
// a server answers each letter; the client measures and prints one line of JSON.
//
//   round_trip          an empty letter and its answer, both sides busy
//   round_trip_asleep   the same when the server has slept since the one before
//   outstanding_64      time per letter while 64 of them wait for their answers
//   large               100 MB to the server, which answers when they have arrived
namespace bench {

inline constexpr std::size_t kLargeBytes = 100'000'000;
inline constexpr int kOutstanding = 64;
inline constexpr int kLetterBytes = 8;

using Clock = std::chrono::steady_clock;

inline double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

struct LetterCase {
  const char* name;
  int repeats;
  bool asleep;                  // the server gets time to fall asleep before each
  std::function<double()> run;  // microseconds
};

// Medians, as a line of JSON.
inline void print_medians(const std::vector<LetterCase>& cases) {
  std::string line;
  for (const LetterCase& each : cases) {
    std::vector<double> times;
    for (int i = 0; i < each.repeats; ++i) {
      if (each.asleep) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      times.push_back(each.run());
    }
    const auto middle = times.begin() + each.repeats / 2;
    std::nth_element(times.begin(), middle, times.end());
    char text[100];
    std::snprintf(text, sizeof text, "%s\"%s\": %.3f", line.empty() ? "" : ", ", each.name,
                  *middle);
    line += text;
  }
  std::printf("{%s}\n", line.c_str());
}

// A client whose pipe sends and receives one letter at a time, both waiting. Pipes without
// send_large() are not measured with large letters. Many letters a repeat: a clock is slower than
// a letter.
template <class Pipe>
std::vector<LetterCase> letter_cases(Pipe& pipe) {
  static constexpr int kTogether = 100;
  static constexpr int kInARow = 20'000;
  const auto round_trip = [&pipe] {
    pipe.send();
    pipe.receive();
  };
  std::vector<LetterCase> cases = {{"round_trip", 200, false,
                                    [=] {
                                      const auto start = Clock::now();
                                      for (int i = 0; i < kTogether; ++i) round_trip();
                                      return microseconds_since(start) / kTogether;
                                    }},
                                   {"round_trip_asleep", 200, true,
                                    [=] {
                                      const auto start = Clock::now();
                                      round_trip();
                                      return microseconds_since(start);
                                    }},
                                   {"outstanding_64", 9, false, [&pipe] {
                                      const auto start = Clock::now();
                                      for (int i = 0; i < kOutstanding; ++i) pipe.send();
                                      for (int i = kOutstanding; i < kInARow; ++i) {
                                        pipe.receive();
                                        pipe.send();
                                      }
                                      for (int i = 0; i < kOutstanding; ++i) pipe.receive();
                                      return microseconds_since(start) / kInARow;
                                    }}};
  if constexpr (requires { pipe.send_large(); }) {
    cases.push_back({"large", 7, false, [&pipe] {
                       const auto start = Clock::now();
                       pipe.send_large();
                       pipe.receive();
                       return microseconds_since(start);
                     }});
  }
  return cases;
}

}  // namespace bench
