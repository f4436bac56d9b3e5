// Processes and what they share, as a line of JSON: microseconds.
//
//   bench_processes publish   a version of 100 MB of weights, beside memcpy of the same bytes
//   bench_processes spawn     8 processes, until each has sent a message
#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "convoy/published.h"
#include "convoy/spawn.h"

namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// As of a model: few large tensors and many small ones.
std::vector<at::Tensor> make_weights() {
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 24; ++i) {
    weights.push_back(at::ones({1000, 1000}));
    for (int j = 0; j < 10; ++j) weights.push_back(at::ones({1000}));
  }
  std::int64_t bytes = 0;
  for (const auto& tensor : weights) bytes += static_cast<std::int64_t>(tensor.nbytes());
  weights.push_back(at::ones({(100'000'000 - bytes) / 4}));
  return weights;
}

void publish() {
  const auto weights = make_weights();
  const convoy::share::Published<std::vector<at::Tensor>> published(weights, {.buffers = 3});
  const auto target = at::ones({25'000'000});
  std::vector<double> ours, plain;
  for (int i = 0; i < 15; ++i) {
    auto start = Clock::now();
    published.publish(weights);
    ours.push_back(microseconds_since(start));
    start = Clock::now();
    auto* to = static_cast<char*>(target.data_ptr());
    for (const auto& tensor : weights) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      to += tensor.nbytes();
    }
    plain.push_back(microseconds_since(start));
  }
  std::printf("{\"publish_100m\": %.3f, \"memcpy_100m\": %.3f}\n", median(ours), median(plain));
}

void greet(int index) {
  convoy::spawned()->parent.send(convoy::share::Message{static_cast<std::int64_t>(index)});
}

void spawn() {
  const auto start = Clock::now();
  auto processes = convoy::spawn<greet>(8);
  for (int i = 0; i < 8; ++i) processes.channel(i).receive_message();
  const double time = microseconds_since(start);
  processes.join(std::chrono::minutes(1));
  std::printf("{\"spawn_8\": %.3f}\n", time);
}

}  // namespace

int main(int argc, char** argv) {
  convoy::start(argc, argv);
  const std::string side = argc > 1 ? argv[1] : "";
  if (side == "publish") {
    publish();
  } else if (side == "spawn") {
    spawn();
  } else {
    std::fprintf(stderr, "usage: bench_processes publish|spawn\n");
    return 2;
  }
  return 0;
}
