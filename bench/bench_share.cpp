// Echoes of tensors between two processes: one round of every case, as a line of JSON.
//
//   bench_share convoy     over a channel
//   bench_share convoy many_1k   one case of it
//   bench_share limit      what the system allows: descriptors over a socket, mapped by the
//   receiver
//
// Cases, each the median of many echoes, in microseconds:
//   shared_1k, shared_100m   a tensor in shared memory, while both sides are busy
//   ..._asleep               the same when the other side has slept since the echo before
//   fresh_100m               a private tensor, which has to be copied into shared memory once
//   many_1k                  a thousand fresh tensors of 1 KB in one message
//   first_100m, _1g, _2g     no echo: share_memory_ of a private tensor, with an empty pool
#include <ATen/Functions.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "convoy/share.h"
#include "os/process.h"
#include "os/segment.h"
#include "os/socket.h"

namespace convoy {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kSmall = 256, kLarge = 25'000'000;  // floats

struct Case {
  const char* name;
  int echoes;
  bool asleep;
  std::function<double()> echo;  // microseconds
};

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::string only;  // the one case to run; empty: all

void run(const std::vector<Case>& cases) {
  std::string line;
  for (const Case& c : cases) {
    if (!only.empty() && only != c.name) continue;
    std::vector<double> times;
    for (int i = 0; i < c.echoes; ++i) {
      if (c.asleep) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      times.push_back(c.echo());
    }
    std::nth_element(times.begin(), times.begin() + c.echoes / 2, times.end());
    char text[100];
    std::snprintf(text, sizeof text, "%s\"%s\": %.3f", line.empty() ? "" : ", ", c.name,
                  times[static_cast<std::size_t>(c.echoes / 2)]);
    line += text;
  }
  std::printf("{%s}\n", line.c_str());
}

ChildProcess start_child(const char* side, int descriptor) {
  return ChildProcess::spawn({.arguments = {"/proc/self/exe", side, std::to_string(descriptor)},
                              .inherited = {descriptor}});
}

void echo_messages(int descriptor) {
  const auto peer = share::Channel::adopt(descriptor);
  for (;;) {
    const auto message = peer.receive_message();
    if (message.size() == 0) return;
    peer.send(message);
  }
}

void run_convoy() {
  auto [mine, theirs] = share::channel();
  const int descriptor = theirs.release();
  auto child = start_child("echo_messages", descriptor);
  ::close(descriptor);
  const auto echo = [&, &peer = mine](const share::Message& message) {
    const auto start = Clock::now();
    peer.send(message);
    const auto back = peer.receive_message();
    return microseconds_since(start);
  };
  const share::Message small{share::share_memory_(at::ones({kSmall}))};
  const share::Message large{share::share_memory_(at::ones({kLarge}))};
  const auto fresh = [&] { return echo({at::ones({kLarge})}); };
  const auto many = [&] {
    share::Message message;
    for (int i = 0; i < 1000; ++i) message.add(at::ones({kSmall}));
    return echo(message);
  };
  const auto first = [](std::int64_t floats) {
    return [floats] {
      const auto tensor = at::ones({floats});
      share::trim();
      const auto start = Clock::now();
      share::share_memory_(tensor);
      return microseconds_since(start);
    };
  };
  for (int i = 0; i < 100; ++i) echo(small);
  for (int i = 0; i < 3; ++i) fresh(), many();  // the pool is warm from then on
  run({{"shared_1k", 3000, false, [&] { return echo(small); }},
       {"shared_100m", 3000, false, [&] { return echo(large); }},
       {"shared_1k_asleep", 200, true, [&] { return echo(small); }},
       {"shared_100m_asleep", 200, true, [&] { return echo(large); }},
       {"fresh_100m", 9, false, fresh},
       {"many_1k", 30, false, many},
       {"first_100m", 5, false, first(kLarge)},
       {"first_1g", 3, false, first(250'000'000)},
       {"first_2g", 1, false, first(500'000'000)}});
  mine.send(share::Message{});
  child.wait(Deadline::after(std::chrono::seconds(10)));
}

// The receiver maps what it gets and looks at it, then sends it back.
void echo_descriptors(int descriptor) {
  Socket peer{UniqueFd(descriptor)};
  const auto deadline = Deadline::after(std::chrono::minutes(5));
  for (;;) {
    std::size_t bytes = 0;
    std::vector<UniqueFd> fds;
    peer.receive(std::as_writable_bytes(std::span(&bytes, 1)), deadline, &fds);
    if (bytes == 0) return;
    auto* const memory = static_cast<float*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0].get(), 0));
    if (memory == MAP_FAILED) std::abort();
    memory[0] += 1;
    const int fd = fds[0].get();
    peer.send(std::as_bytes(std::span(&bytes, 1)), deadline, {&fd, 1});
    ::munmap(memory, bytes);
  }
}

void run_limit() {
  auto [mine, theirs] = Socket::pair();
  const UniqueFd given = theirs.release();
  auto child = start_child("echo_descriptors", given.get());
  const auto deadline = Deadline::after(std::chrono::minutes(5));
  const auto pass = [&, &peer = mine](const Segment& segment) {
    std::size_t bytes = segment.size();
    const int fd = segment.fd();
    peer.send(std::as_bytes(std::span(&bytes, 1)), deadline, {&fd, 1});
    std::vector<UniqueFd> fds;
    peer.receive(std::as_writable_bytes(std::span(&bytes, 1)), deadline, &fds);
  };
  const auto echo = [&](const Segment& segment) {
    const auto start = Clock::now();
    pass(segment);
    return microseconds_since(start);
  };
  const auto small = Segment::create(4 * kSmall, "bench", Segment::Warm::kYes);
  const auto large = Segment::create(4 * kLarge, "bench", Segment::Warm::kYes);
  const auto pool = Segment::create(4 * kLarge, "bench", Segment::Warm::kYes);
  const auto fresh = [&] {  // into a warm pool
    const auto tensor = at::ones({kLarge});
    const auto start = Clock::now();
    std::memcpy(pool.data(), tensor.data_ptr(), tensor.nbytes());
    pass(pool);
    return microseconds_since(start);
  };
  const auto many = [&] {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 1000; ++i) tensors.push_back(at::ones({kSmall}));
    const auto start = Clock::now();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      std::memcpy(pool.data() + i * 4 * kSmall, tensors[i].data_ptr(), 4 * kSmall);
    }
    pass(pool);
    return microseconds_since(start);
  };
  for (int i = 0; i < 100; ++i) echo(small);
  run({{"shared_1k", 3000, false, [&] { return echo(small); }},
       {"shared_100m", 1000, false, [&] { return echo(large); }},
       {"shared_1k_asleep", 200, true, [&] { return echo(small); }},
       {"shared_100m_asleep", 200, true, [&] { return echo(large); }},
       {"fresh_100m", 9, false, fresh},
       {"many_1k", 30, false, many}});
  const std::size_t end = 0;
  mine.send(std::as_bytes(std::span(&end, 1)), deadline);
  child.wait(Deadline::after(std::chrono::seconds(10)));
}

}  // namespace
}  // namespace convoy

int main(int argc, char** argv) {
  const std::string side = argc > 1 ? argv[1] : "";
  if (argc > 2) convoy::only = argv[2];
  if (side == "convoy") {
    convoy::run_convoy();
  } else if (side == "limit") {
    convoy::run_limit();
  } else if (side == "echo_messages" && argc > 2) {
    convoy::echo_messages(std::atoi(argv[2]));
  } else if (side == "echo_descriptors" && argc > 2) {
    convoy::echo_descriptors(std::atoi(argv[2]));
  } else {
    std::fprintf(stderr, "usage: bench_share convoy|limit\n");
    return 2;
  }
  return 0;
}
