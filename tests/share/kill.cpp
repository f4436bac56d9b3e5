#include "kill.h"

#include <signal.h>
#include <torch/types.h>

#include <random>
#include <thread>

#include "base/concat.h"

namespace convoy::share::test {
namespace {

// Receives, keeps, drops, sends back and makes anew, until it is killed.
void run_victim(const Channel& peer, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<at::Tensor> kept;
  for (;;) {
    switch (random() % 5) {
      case 0: peer.send(at::full({static_cast<std::int64_t>(1 + random() % 5000)}, 1)); break;
      case 1:
        if (!kept.empty()) peer.send(kept[random() % kept.size()]);
        break;
      case 2:
        if (kept.size() > 8) kept.erase(kept.begin() + static_cast<long>(random() % kept.size()));
        break;
      default:
        if (const auto message = peer.try_receive()) kept.push_back(message->tensor(0));
    }
    if (kept.size() > 20) kept.clear();
  }
}

void run_survivor(const Channel& peer, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<at::Tensor> kept;
  try {
    for (;;) {
      auto tensor = at::full({static_cast<std::int64_t>(1 + random() % 3000)}, 7);
      if (random() % 2 == 0) share_memory_(tensor);
      peer.send(Message{tensor}, soon());
      if (random() % 3 == 0) kept.push_back(tensor);
      while (const auto message = peer.try_receive()) {
        const auto& got = message->tensor(0);
        const float value = got[0].item<float>();
        EXPECT_TRUE(value == 1 || value == 7) << value;
        if (random() % 2 == 0) kept.push_back(got);
      }
      if (kept.size() > 30) kept.clear();
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
  }
  // What a dead process shared is still there.
  for (const auto& tensor : kept) {
    EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, tensor[0].item<float>())));
  }
}

}  // namespace

void run_kills(int victims, unsigned seed) {
  RankGroup group(1 + victims, RankMode::kProcesses, {.limit = std::chrono::seconds(100)});
  group.start([&](Rank& r) {
    if (r.id() != 0) {
      const Channel peer =
          connect(r.store()->get(concat("path", r.id()), r.deadline()), r.deadline());
      r.mark("running");
      run_victim(peer, seed * 1000 + static_cast<unsigned>(r.id()));
    }
    const TempFolder folder("share");
    std::vector<std::jthread> threads;
    for (int v = 1; v < r.size(); ++v) {
      const auto listener = listen(concat(folder.path(), "/", v));
      r.store()->set(concat("path", v), listener.path());
      threads.emplace_back([peer = listener.accept(r.deadline()), seed, v] {
        run_survivor(peer, seed * 7919 + static_cast<unsigned>(v));
      });
    }
    r.mark("running");
    threads.clear();
    expect_nothing_held();
  });
  group.wait_mark("running");
  std::mt19937 random(seed);
  for (int v = 1; v <= victims; ++v) {
    // A random moment of a random operation.
    const auto until = Deadline::after(std::chrono::microseconds(random() % 5000));
    while (!until.expired()) std::this_thread::yield();
    group.kill(v, SIGKILL);
  }
  group.join();
}

}  // namespace convoy::share::test
