// What process groups cost: bench/group.py runs this under `convoy run`.
//
//   bench_group overhead   ProcessGroup::all_reduce beside coll's, in turns, same ranks, same
//   buffer bench_group start      from main to the first finished all-reduce
//
// Rank 0 prints one line of numbers for each result.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <vector>

#include "coll/group.h"
#include "convoy/error.h"
#include "convoy/init.h"

namespace convoy {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <class Call>
double time_per_call(int calls, const Call& call) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return microseconds(Clock::now() - start) / calls;
}

void measure_overhead() {
  const auto world = init();
  const auto below = coll::Group::create(with_prefix(world.store(), "bench"), world.rank(),
                                         world.size(), {.name = "below"});
  for (const std::int64_t elements : {2, 256, 4096}) {
    const auto tensor = world.allocate({elements});
    tensor.zero_();
    const auto ours = [&] { world.all_reduce(tensor); };
    const auto theirs = [&] {
      below->all_reduce(tensor.data_ptr(), tensor.data_ptr(), static_cast<std::size_t>(elements),
                        coll::DataType::kF32);
    };
    constexpr int kCalls = 500, kRounds = 101;
    std::vector<double> group, coll, more;
    for (int round = -2; round < kRounds; ++round) {
      const double a = time_per_call(kCalls, ours), b = time_per_call(kCalls, theirs);
      if (round < 0) continue;  // warm
      group.push_back(a);
      coll.push_back(b);
      more.push_back(a - b);
    }
    if (world.rank() == 0) {
      std::printf("overhead %lld %.4f %.4f %.4f\n", 4 * static_cast<long long>(elements),
                  median(group), median(coll), median(more));
    }
  }
}

// All ranks' times are of one clock: that of the host since it was started.
void measure_start(Clock::time_point begin) {
  const auto world = init();
  const auto met = Clock::now();
  const auto tensor = at::ones({1024});
  world.all_reduce(tensor);
  const auto end = Clock::now();
  const auto nanoseconds = [](Clock::time_point when) {
    return static_cast<std::int64_t>(when.time_since_epoch().count());
  };
  const auto all = world.all_gather(
      at::tensor({nanoseconds(begin), nanoseconds(met), nanoseconds(end)}, at::kLong));
  const auto last = std::get<0>(all.max(0));
  if (world.rank() != 0) return;
  const auto since = [&](int from, int to) {
    return static_cast<double>(last[to].item<std::int64_t>() - last[from].item<std::int64_t>()) /
           1e6;
  };
  std::printf("start %d %.2f %.2f\n", world.size(), since(0, 1), since(0, 2));
}

}  // namespace
}  // namespace convoy

int main(int argc, char** argv) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    if (argc == 2 && std::strcmp(argv[1], "overhead") == 0) {
      convoy::measure_overhead();
    } else if (argc == 2 && std::strcmp(argv[1], "start") == 0) {
      convoy::measure_start(begin);
    } else {
      std::fprintf(stderr, "bench_group: overhead or start\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
