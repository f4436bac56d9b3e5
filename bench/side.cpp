#include "side.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

namespace bench {
namespace {

using Clock = std::chrono::steady_clock;

// From here on every rank writes its input anew before each call, outside the time that counts: a
// program reduces what it has just computed, and a buffer that only the operation touches would
// stay in the cache of whoever reduces it.
constexpr std::size_t kFilled = std::size_t{64} << 10;

// With plain stores, as results are written. The value is about 1 in f32 and in bf16.
void fill(std::span<std::byte> memory) {
  auto* words = reinterpret_cast<std::uint32_t*>(memory.data());
  const std::size_t count = memory.size() / sizeof(std::uint32_t);
  for (std::size_t i = 0; i < count; ++i) words[i] = 0x3f803f80;
}

// Microseconds a call, on the slowest rank.
double time_calls(Side& side, std::size_t variant, std::size_t bytes, int calls) {
  Clock::duration elapsed{};
  if (bytes < kFilled) {
    side.barrier();
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) side.call(variant);
    elapsed = Clock::now() - start;
  } else {
    for (int i = 0; i < calls; ++i) {
      fill(side.input());
      side.barrier();
      const auto start = Clock::now();
      side.call(variant);
      elapsed += Clock::now() - start;
    }
  }
  return side.largest(std::chrono::duration<double, std::micro>(elapsed).count() / calls);
}

double measure(Side& side, std::size_t variant, const Case& next) {
  double once = time_calls(side, variant, next.bytes, 1);  // also warms up
  once = std::min(once, time_calls(side, variant, next.bytes, 2));
  const double calls = next.seconds * 1e6 / std::max(once, 0.05);
  return time_calls(side, variant, next.bytes, static_cast<int>(std::clamp(calls, 1.0, 200000.0)));
}

}  // namespace

int serve(int rank, Side& side) {
  const char* folder = std::getenv("BENCH_SIDE");
  if (!folder) {
    std::cerr << "This is started by bench/coll.py (make bench-coll).\n";
    return 2;
  }
  std::ifstream cases(std::string(folder) + "/" + std::to_string(rank));
  std::ofstream answers;
  if (rank == 0) answers.open(std::string(folder) + "/answers");
  for (std::string line; std::getline(cases, line);) {
    Case next;
    std::istringstream(line) >> next.op >> next.type >> next.path >> next.bytes >> next.seconds;
    const auto variants = side.prepare(next);
    std::ostringstream answer;
    for (std::size_t v = 0; v < variants.size(); ++v) {
      const double us = measure(side, v, next);
      answer << (v == 0 ? "" : ", ") << '"' << variants[v] << "\": " << us;
    }
    if (rank == 0) answers << "{" << answer.str() << "}" << std::endl;
  }
  return 0;
}

}  // namespace bench
