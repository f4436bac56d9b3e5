// Queues of tensors, events, barriers and locks: in one process, and between processes.
#include "convoy/queue.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <torch/types.h>

#include <filesystem>
#include <random>
#include <thread>

#include "base/concat.h"
#include "queue_kill.h"
#include "support.h"

namespace convoy::share::test {
namespace {

struct QueueTest : ShareTest {};

Deadline brief() { return Deadline::after(std::chrono::milliseconds(5)); }

TEST_F(QueueTest, TensorsWithMetadata) {
  const Queue queue(QueueOptions{.capacity = 4});
  auto tensor = at::arange(6, at::kFloat).view({2, 3});
  queue.put({tensor, "step", 41, 0.5, true, tensor[1], Bytes{std::byte{7}}});
  EXPECT_EQ(queue.size(), 1u);
  const Message message = queue.get();
  EXPECT_EQ(message.text(1), "step");
  EXPECT_EQ(message.integer(2), 41);
  message.tensor(0).fill_(3);
  EXPECT_EQ(tensor.sum().item<float>(), 18);  // the same bytes
  EXPECT_TRUE(message.tensor(5).is_alias_of(message.tensor(0)));
  EXPECT_EQ(message.tensor(0).storage().unsafeGetStorageImpl(),
            tensor.storage().unsafeGetStorageImpl());  // it came home
  queue.put(at::ones({3}));
  EXPECT_EQ(queue.get_tensor().sum().item<float>(), 3);
  queue.put(Message{});
  EXPECT_EQ(queue.get().size(), 0u);
}

TEST_F(QueueTest, WaitsAndLimits) {
  const Queue queue(QueueOptions{.capacity = 2});
  EXPECT_EQ(queue.capacity(), 2u);
  EXPECT_FALSE(queue.try_get());
  expect_error(ErrorKind::kTimeout, "empty", [&] { queue.get(brief()); });
  EXPECT_TRUE(queue.try_put({at::ones({2})}));
  EXPECT_TRUE(queue.try_put({2}));
  EXPECT_FALSE(queue.try_put({at::ones({5})}));
  expect_error(ErrorKind::kTimeout, "full", [&] { queue.put({3}, brief()); });
  EXPECT_EQ(queue.put_many({{3}, {4}}, brief()), 0u);
  EXPECT_EQ(queue.get_many(10, soon()).size(), 2u);
  EXPECT_TRUE(queue.get_many(10, brief()).empty());
  std::vector<Message> many;
  for (int i = 0; i < 100; ++i) many.push_back({i, at::full({3}, i)});
  std::jthread consumer([&] {
    int next = 0;
    while (next < 100) {
      for (const Message& message : queue.get_many(7, soon())) {
        EXPECT_EQ(message.integer(0), next);
        EXPECT_EQ(message.tensor(1)[0].item<int>(), next++);
      }
    }
  });
  EXPECT_EQ(queue.put_many(many, soon()), 100u);
  consumer.join();
  queue.put({1});
  queue.close();
  expect_error(ErrorKind::kPeerLost, "closed", [&] { queue.put({2}); });
  EXPECT_EQ(queue.get().integer(0), 1);
  expect_error(ErrorKind::kPeerLost, "closed", [&] { queue.get(); });
  EXPECT_TRUE(queue.closed());
}

TEST_F(QueueTest, Arguments) {
  const Queue none;
  expect_error(ErrorKind::kInvalidArgument, "not a queue", [&] { none.put({1}); });
  expect_error(ErrorKind::kInvalidArgument, "capacity of a queue must be from 1 to 16777216, got 0",
               [] { Queue(QueueOptions{.capacity = 0}); });
  expect_error(ErrorKind::kInvalidArgument, "items of 1",
               [] { Queue(QueueOptions{.item_bytes = 1}); });
  expect_error(ErrorKind::kInvalidArgument, "copy_below + 512",
               [] { Queue(QueueOptions{.item_bytes = 2048, .copy_below = 2000}); });
  expect_error(ErrorKind::kInvalidArgument, "must be from 1 to 65535, got 0",
               [] { Barrier(std::size_t{0}); });
  const Queue queue(QueueOptions{.capacity = 2});
  expect_error(ErrorKind::kInvalidArgument, "a queue, not an event", [&] { Event{queue}; });
  expect_error(ErrorKind::kUnsupported, "through a queue", [&] { queue.put({queue}); });
  expect_error(ErrorKind::kInvalidArgument, "detach",
               [&] { queue.put(at::ones({2}).requires_grad_() * 2); });
  expect_error(ErrorKind::kInvalidArgument, "not a queue", [&] { Shared::adopt({}); });
  expect_error(ErrorKind::kInvalidArgument, "not a valid name", [&] { offer(queue, "a/b"); });
  EXPECT_EQ(queue.size(), 0u);
  EXPECT_EQ(queue.lost().items, 0u);
}

TEST_F(QueueTest, LargeMessages) {
  const Queue queue(QueueOptions{.capacity = 3, .item_bytes = 512});
  Message large{std::string(100'000, 'x')};
  for (int i = 0; i < 200; ++i) large.add(at::full({2}, i));
  queue.put(large);
  queue.put({1});
  const Message got = queue.get();
  EXPECT_EQ(got.text(0).size(), 100'000u);
  EXPECT_EQ(got.tensor(200)[1].item<int>(), 199);
  EXPECT_EQ(queue.get().integer(0), 1);
  queue.put(large);  // never received: its memory goes with the queue
  queue.put({at::ones({4})});
}

TEST_F(QueueTest, CopiesIfAskedTo) {
  const Queue queue(QueueOptions{.item_bytes = 4096, .copy_below = 1024});
  const auto small = at::arange(256, at::kFloat), large = at::ones({257});
  const auto shared = share_memory_(at::ones({4}));
  queue.put({small, small.view({2, 128})[1], large, shared});
  EXPECT_FALSE(is_shared(small));
  EXPECT_TRUE(is_shared(large));
  const Message got = queue.get();
  EXPECT_TRUE(at::equal(got.tensor(0), small));
  EXPECT_TRUE(got.tensor(1).is_alias_of(got.tensor(0)));
  got.tensor(1).fill_(-1);
  EXPECT_EQ(got.tensor(0)[255].item<float>(), -1);
  EXPECT_EQ(small[255].item<float>(), 255);
  EXPECT_TRUE(got.tensor(2).is_alias_of(large));
  EXPECT_TRUE(got.tensor(3).is_alias_of(shared));
  got.tensor(0).resize_({1000});  // it is private, and an ordinary tensor
}

// --- Processes ----------------------------------------------------------------------------------

// test_fd_sharing with queues; and a queue that goes over a channel.
TEST_F(QueueTest, Sharing) {
  run_pair(
      [](const Channel& peer) {
        const Queue there(QueueOptions{}), back(QueueOptions{});
        peer.send(Message{there, "and", back});
        for (int i = 0; i < 30; ++i) {
          auto tensor = at::zeros({5, 5});
          there.put(tensor.select(1, 1));
          EXPECT_EQ(back.get().text(0), "filled");
          EXPECT_EQ(tensor.sum().item<float>(), 20);
        }
        there.close();
        peer.receive_message();
      },
      [](const Channel& peer) {
        {
          const Message message = peer.receive_message();
          const Queue there(message.shared(0)), back(message.shared(2));
          for (int i = 0; i < 30; ++i) {
            there.get_tensor().fill_(4);
            back.put({"filled"});
          }
          expect_error(ErrorKind::kPeerLost, "closed by pid", [&] { there.get(); });
        }
        peer.send(Message{true});
      });
}

// test_fd_preserve_sharing with a queue: views of one storage, in one message and in several.
TEST_F(QueueTest, PreserveSharing) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    {
      const Queue queue = meet_queue(r);
      if (r.id() == 0) {
        auto tensor = at::zeros({5, 5});
        queue.put({tensor, tensor[1]});
        queue.put({tensor.select(1, 1)});
        r.barrier();
        EXPECT_EQ(tensor.sum().item<float>(), 25);
      } else {
        const Message first = queue.get();
        const auto second = queue.get_tensor();
        EXPECT_EQ(second.storage().unsafeGetStorageImpl(),
                  first.tensor(0).storage().unsafeGetStorageImpl());
        first.tensor(0).fill_(1);
        EXPECT_EQ(second.sum().item<float>(), 5);
        r.barrier();
      }
      r.barrier();
    }
    expect_nothing_held();
  });
}

// What a process has put outlives it: its own tensors, those of others that it passed on, and
// messages that are in shared memory themselves. In PyTorch the producer has to stay alive.
TEST_F(QueueTest, ProducersMayEnd) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    Queue queue = meet_queue(r),
          second = meet_at<Queue>(r, "second", [] { return Queue(QueueOptions{}); });
    if (r.id() == 1) {
      const auto passed_on = queue.get_tensor();
      second.put({passed_on, at::full({1000}, 2), std::string(5000, 'y')});
      r.mark("put");
      ::raise(SIGKILL);
    }
    if (r.id() == 2) {
      r.wait_for("go");
      const Message message = second.get();
      EXPECT_EQ(message.tensor(0).sum().item<float>(), 3000);
      EXPECT_EQ(message.tensor(1).sum().item<float>(), 2000);
      EXPECT_EQ(message.text(2).size(), 5000u);
      message.tensor(0).fill_(4);
      r.mark("got");
      r.wait_for("end");
      return;
    }
    auto tensor = at::full({1000}, 3);
    queue.put(tensor);
    r.wait_for("go");
    r.wait_for("end");
    EXPECT_EQ(tensor.sum().item<float>(), 4000);
    tensor.reset();
    queue = {};
    second = {};
    expect_nothing_held();
  });
  group.wait_mark("put", 1);
  group.kill(1, SIGKILL);
  group.post("go");
  group.wait_mark("got", 2);
  group.post("end");
  group.join();
}

// Victims put, get, keep and pass on until they are killed, at random moments; afterwards nothing
// of the survivors' memory is held. share_soak_test runs it with many seeds.
TEST_F(QueueTest, KillsLeaveNothingBehind) { run_queue_kills(6, 1); }

// A process lets go of a queue with its messages in it; whoever could have taken them is killed.
// The memory comes back.
TEST_F(QueueTest, WhatNobodyCanTakeAnyMore) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    {
      const Queue queue = meet_queue(r);
      if (r.id() == 1) {
        EXPECT_EQ(queue.get(r.deadline()).tensor(0).sum().item<float>(), 5);
        r.mark("took one");
        r.wait_for("never");
      }
      for (int i = 0; i < 4; ++i) queue.put({at::ones({5}), std::string(3000, 'z')});
      r.wait_for("took one");
    }
    EXPECT_GE(usage().elsewhere, 3u);
    r.mark("let go");
    r.wait_for("killed");
    expect_nothing_held();
  });
  group.wait_mark("took one", 1);
  group.post("took one", 0);
  group.wait_mark("let go", 0);
  group.kill(1, SIGKILL);
  group.post("killed", 0);
  group.join();
}

TEST_F(QueueTest, LocksOfTheDead) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    const Lock lock = meet_at<Lock>(r, "lock", [] { return Lock::create(); });
    if (r.id() == 1) {
      EXPECT_EQ(lock.lock(r.deadline()), Lock::Taken::kFree);
      expect_error(ErrorKind::kInvalidArgument, "holds the lock already",
                   [&] { lock.lock(r.deadline()); });
      r.mark("locked");
      r.wait_for("never");
    }
    r.wait_for("locked");
    EXPECT_FALSE(lock.try_lock());
    expect_error(ErrorKind::kTimeout, "held it until", [&] { lock.lock(brief()); });
    expect_error(ErrorKind::kInvalidArgument, "does not hold", [&] { lock.unlock(); });
    r.mark("waits");
    EXPECT_EQ(lock.lock(r.deadline()), Lock::Taken::kFromDead);
    lock.unlock();
    EXPECT_EQ(lock.try_lock(), Lock::Taken::kFree);
    lock.unlock();
  });
  group.wait_mark("locked", 1);
  group.post("locked", 0);
  group.wait_mark("waits", 0);
  group.kill(1, SIGKILL);
  group.join();
}

TEST_F(QueueTest, BarriersOfTheDead) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    const Barrier barrier = meet_at<Barrier>(r, "barrier", [] { return Barrier(2); });
    barrier.wait(r.deadline());
    r.mark("met");
    if (r.id() == 1) r.wait_for("never");
    expect_error(ErrorKind::kPeerLost, "has ended", [&] { barrier.wait(r.deadline()); });
    expect_error(ErrorKind::kPeerLost, "has ended", [&] { barrier.wait(r.deadline()); });
    barrier.reset();
    std::jthread other([&] { barrier.wait(r.deadline()); });
    barrier.wait(r.deadline());
  });
  group.wait_mark("met");
  group.kill(1, SIGKILL);
  group.join();
}

// A name goes with its process; what one that was killed leaves is no obstacle.
TEST_F(QueueTest, Names) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    if (r.id() == 1) {
      const Queue queue(QueueOptions{});
      offer(queue, "jobs");
      expect_error(ErrorKind::kInvalidArgument, "taken", [&] { offer(queue, "jobs"); });
      r.store()->set("process", std::to_string(own_process_word()));
      r.mark("offered");
      r.wait_for("never");
    }
    r.wait_for("offered");
    const Queue theirs(open("jobs", r.deadline()));
    EXPECT_TRUE(theirs == Queue(open("jobs", r.deadline())));
    expect_error(ErrorKind::kTimeout, "nobody offers", [&] { open("other", brief()); });
    r.mark("opened");
    r.wait_for("killed");
    const ProcessWord other = std::stoull(r.store()->get("process", r.deadline()));
    while (!is_dead(other, own_domain())) std::this_thread::yield();
    expect_error(ErrorKind::kTimeout, "nobody offers", [&] { open("jobs", brief()); });
    const Queue mine(QueueOptions{});
    offer(mine, "jobs");
    theirs.put({1});  // it lives on
    EXPECT_EQ(theirs.get().integer(0), 1);
    struct stat info {};
    const std::string folder = concat(std::getenv("CONVOY_SHARE_FOLDER"), "/convoy-", ::geteuid());
    ASSERT_EQ(::stat(folder.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    EXPECT_EQ(files("n-").size(), 1u);
  });
  group.wait_mark("offered", 1);
  group.post("offered", 0);
  group.wait_mark("opened", 0);
  group.kill(1, SIGKILL);
  group.post("killed", 0);
  group.join();
}

}  // namespace
}  // namespace convoy::share::test
