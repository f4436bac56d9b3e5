// Queues between processes: one round of every case, as a line of JSON, in microseconds an item.
//
//   bench_queue [case]
//
// Cases; producers make each tensor anew, and consumers look at it:
//   queue_1k        2 producers and 2 consumers, 1 KB tensors, shared
//   queue_1k_copy   the same with a queue that copies small tensors
//   queue_1m        2 producers, 1 consumer, batches of 1 MB that are born shared
#include <ATen/Functions.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "convoy/queue.h"
#include "os/process.h"

namespace convoy {
namespace {

using Clock = std::chrono::steady_clock;
using share::Message;

struct Case {
  const char* name;
  int producers;
  int consumers;
  std::int64_t floats;
  std::int64_t items;  // of a producer
  share::QueueOptions options;
};

const std::vector<Case> kCases = {
    {"queue_1k", 2, 2, 256, 20'000, {.capacity = 256}},
    {"queue_1k_copy", 2, 2, 256, 40'000, {.capacity = 256, .copy_below = 1024}},
    {"queue_1m", 2, 1, 262'144, 2'000, {.capacity = 4}},
};

Deadline limit() { return Deadline::after(std::chrono::minutes(2)); }

void produce(const share::Queue& queue, std::int64_t floats, std::int64_t items) {
  for (std::int64_t i = 0; i < items; ++i) {
    if (floats <= 256) {
      queue.put({at::ones({floats})}, limit());
    } else {
      auto batch = share::empty({floats});
      batch.fill_(1);
      queue.put({batch}, limit());
    }
  }
}

void consume(const share::Queue& queue) {
  double sum = 0;
  for (;;) {
    const Message message = queue.get(limit());
    if (message.size() == 0) break;
    sum += message.tensor(0).const_data_ptr<float>()[0];
  }
  if (sum < 0) std::abort();
}

// A producer or consumer, told what to do over a channel.
void work(int descriptor) {
  const auto parent = share::Channel::adopt(descriptor);
  const Message job = parent.receive_message();
  const share::Queue queue(job.shared(0));
  const share::Event go(job.shared(1));
  const bool produces = job.integer(2) > 0;
  produce(queue, job.integer(3), produces ? 10 : 0);  // warm
  parent.send(Message{true});
  go.wait(limit());
  if (produces) {
    produce(queue, job.integer(3), job.integer(2));
  } else {
    consume(queue);
  }
  parent.send(Message{true});
  parent.receive_message();
}

double run(const Case& one) {
  const share::Queue queue(one.options);
  const auto go = share::Event::create();
  std::vector<share::Channel> channels;
  std::vector<ChildProcess> children;
  const int count = one.producers + one.consumers;
  for (int i = 0; i < count; ++i) {
    auto [mine, theirs] = share::channel();
    const int descriptor = theirs.release();
    children.push_back(
        ChildProcess::spawn({.arguments = {"/proc/self/exe", "work", std::to_string(descriptor)},
                             .inherited = {descriptor}}));
    ::close(descriptor);
    mine.send(Message{queue, go, i < one.producers ? one.items : std::int64_t{0}, one.floats});
    channels.push_back(mine);
  }
  int warm = one.producers * 10;
  for (; warm > 0; --warm) queue.get(limit());
  for (const auto& channel : channels) channel.receive_message();
  const auto start = Clock::now();
  go.set();
  for (int i = 0; i < one.producers; ++i) channels[static_cast<std::size_t>(i)].receive_message();
  for (int i = 0; i < one.consumers; ++i) queue.put(Message{});
  for (int i = one.producers; i < count; ++i) {
    channels[static_cast<std::size_t>(i)].receive_message();
  }
  const double total = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  for (const auto& channel : channels) channel.send(Message{});
  for (auto& child : children) child.wait(limit());
  return total / static_cast<double>(one.producers * one.items);
}

}  // namespace
}  // namespace convoy

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "work" && argc > 2) {
    convoy::work(std::atoi(argv[2]));
    return 0;
  }
  std::string line;
  for (const auto& one : convoy::kCases) {
    if (!what.empty() && what != one.name) continue;
    char text[100];
    std::snprintf(text, sizeof text, "%s\"%s\": %.3f", line.empty() ? "" : ", ", one.name,
                  convoy::run(one));
    line += text;
  }
  std::printf("{%s}\n", line.c_str());
  return 0;
}
