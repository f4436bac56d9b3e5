// Ranks that meet: each greets the others through the store of `convoy run`, they add up a number
// together, and measure how long a round trip to the store takes.
//
//   convoy run -n 2 meet
#include <convoy/error.h>
#include <convoy/store.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

double median_round_trip_us(convoy::Store& store, const std::string& key) {
  std::vector<double> times(500);
  for (auto& microseconds : times) {
    const auto start = Clock::now();
    store.try_get(key);
    microseconds = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

void meet(convoy::Store& store, int rank, int size) {
  const auto deadline = convoy::Deadline::after(std::chrono::seconds(60));
  store.set("meet/" + std::to_string(rank), "pid " + std::to_string(::getpid()));
  std::string others;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto greeting = store.get("meet/" + std::to_string(peer), deadline);
    others +=
        (others.empty() ? "" : ", ") + ("rank " + std::to_string(peer)) + " (" + greeting + ")";
  }
  store.add("meet/sum", rank + 1);
  store.barrier("meet/added", size, deadline);
  const auto sum = store.add("meet/sum", 0);
  if (sum != std::int64_t{size} * (size + 1) / 2) {
    throw convoy::Error(convoy::ErrorKind::kInternal, "the ranks' sum is " + std::to_string(sum));
  }
  std::printf("rank %d of %d met %s; together they counted to %lld; a round trip takes %.1f µs\n",
              rank, size, others.empty() ? "nobody" : others.c_str(), static_cast<long long>(sum),
              median_round_trip_us(store, "meet/sum"));
}

}  // namespace

int main(int, char** arguments) {
  try {
    if (const auto store = convoy::launcher_store()) {
      meet(*store, number_from("RANK", 0), number_from("WORLD_SIZE", 1));
    } else {
      std::fprintf(stderr,
                   "not started by `convoy run`, so I am alone; company: convoy run -n 2 %s\n",
                   arguments[0]);
      meet(*convoy::make_local_store(), 0, 1);
    }
    return 0;
  } catch (const convoy::Error& error) {
    std::fprintf(stderr, "meet: %s\n", error.what());
    return 1;
  }
}
