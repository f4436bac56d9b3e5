// Queues that processes let go of, that are under way, closed, or found by name.
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/concat.h"
#include "convoy/queue.h"
#include "os/socket.h"
#include "queue_kill.h"
#include "support.h"

namespace convoy::share::test {
namespace {

struct QueueLifeTest : ShareTest {};

Deadline a_moment() { return Deadline::after(std::chrono::milliseconds(20)); }

// The sender has let go of it before it arrives.
TEST_F(QueueLifeTest, UnderWayOverAChannel) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    {
      const Channel peer = meet(r);
      if (r.id() == 0) {
        Queue queue(QueueOptions{});
        queue.put({at::full({1000}, 3), "first"});
        queue.put({"second"});
        peer.send(Message{queue});
        queue = {};
        r.barrier();
      } else {
        r.barrier();
        const Queue queue(peer.receive_message().shared(0));
        EXPECT_EQ(queue.size(), 2u);
        EXPECT_EQ(queue.get(soon()).tensor(0).sum().item<float>(), 3000);
        EXPECT_EQ(queue.get(soon()).text(0), "second");
        EXPECT_EQ(queue.lost().items, 0u);
      }
      r.barrier();
    }
    r.barrier();
    expect_nothing_held();
  });
}

std::vector<int> copies(const Queue& queue) {
  std::vector<int> made;
  for (const int descriptor : queue.descriptors()) made.push_back(::dup(descriptor));
  return made;
}

// Nobody has it but who has its descriptors.
TEST_F(QueueLifeTest, DescriptorsThatNobodyHasAdopted) {
  Queue queue(QueueOptions{});
  queue.put({at::full({1000}, 3)});
  std::vector<int> under_way = copies(queue);
  queue = {};
  EXPECT_EQ(usage().elsewhere, 1u);
  queue = Queue(Shared::adopt(under_way));
  EXPECT_EQ(queue.size(), 1u);
  queue.put({at::full({1000}, 4)});  // of memory that the queue has, and has not
  queue.put({at::full({3'000'000}, 5)});
  EXPECT_EQ(queue.get_tensor(soon()).sum().item<float>(), 3000);
  under_way = copies(queue);
  queue = {};
  for (const int descriptor : under_way) ::close(descriptor);
  expect_nothing_held();
}

// Orphans do not pile up: each has descriptors.
TEST_F(QueueLifeTest, ManyRoundsWithFewDescriptors) {
  run_pair(
      [](const Channel& peer) {
        peer.send(at::ones({1}));
        rlimit before{};
        ::getrlimit(RLIMIT_NOFILE, &before);
        const rlimit few{.rlim_cur = 100, .rlim_max = before.rlim_max};
        ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
        for (int round = 0; round < 100; ++round) {
          {
            const Queue queue(QueueOptions{.capacity = 2});
            queue.put({at::full({10}, round)});
            peer.send(Message{queue});
          }
          peer.receive_message();
        }
        ::setrlimit(RLIMIT_NOFILE, &before);
      },
      [](const Channel& peer) {
        peer.receive();
        for (int round = 0; round < 100; ++round) {
          {
            const Queue queue(peer.receive_message().shared(0));
            EXPECT_EQ(queue.get_tensor(soon()).sum().item<int>(), 10 * round);
          }
          peer.send(Message{});
        }
      });
}

// What a call has taken, it returns, also if another consumer takes the last ones meanwhile.
TEST_F(QueueLifeTest, ClosedAndEmptiedByTwo) {
  constexpr int kMessages = 100;
  std::vector<Message> many;
  for (int i = 0; i < kMessages; ++i) many.push_back({i});
  for (int round = 0; round < 300; ++round) {
    const Queue queue(QueueOptions{.capacity = kMessages, .item_bytes = 256});
    ASSERT_EQ(queue.put_many(many, soon()), many.size());
    queue.close();
    std::atomic<std::size_t> got{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
          try {
            for (;;) got += queue.get_many(kMessages, soon()).size();
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
          }
        });
      }
    }
    ASSERT_EQ(got, many.size()) << "round " << round;
  }
}

TEST_F(QueueLifeTest, PutManyTellsWhatItPut) {
  const Queue queue(QueueOptions{.capacity = 100});
  const auto bad = at::ones({2}).requires_grad_() * 2;
  std::vector<Message> messages;
  for (int i = 0; i < 40; ++i) messages.push_back({i});
  messages.push_back({bad});
  messages.push_back({41});
  EXPECT_EQ(queue.put_many(messages, soon()), 40u);
  EXPECT_EQ(queue.size(), 40u);
  messages.erase(messages.begin(), messages.begin() + 40);
  expect_error(ErrorKind::kInvalidArgument, "detach", [&] { queue.put_many(messages, soon()); });
  EXPECT_EQ(queue.get_many(100, soon()).size(), 40u);
  const Queue small(QueueOptions{.capacity = 2});
  std::jthread closer([&] {
    while (small.size() < 2) std::this_thread::yield();
    small.close();
  });
  EXPECT_EQ(small.put_many({{1}, {2}, {3}}, soon()), 2u);
  closer.join();
  expect_error(ErrorKind::kPeerLost, "closed", [&] { small.put_many({{3}}, soon()); });
  EXPECT_EQ(small.lost().items, 0u);
}

// Has no memory.
struct NoMemory : c10::Allocator {
  c10::DataPtr allocate(std::size_t) override { throw std::runtime_error("no memory at all"); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}
};

// Whatever goes wrong on arrival: nothing stays taken, and the loss is counted.
TEST_F(QueueLifeTest, MessagesThatCannotBeUnpacked) {
  const Queue queue(QueueOptions{.capacity = 8, .item_bytes = 4096, .copy_below = 1024});
  const auto fill = [&] {
    for (int i = 0; i < 4; ++i) queue.put({at::ones({1000}), at::ones({8})});  // shared, copied
  };
  NoMemory none;
  const auto without_memory = [&](const auto& call) {
    c10::Allocator* const usual = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&none, 100);
    call();
    c10::SetCPUAllocator(usual, 100);
  };
  fill();
  without_memory([&] {
    EXPECT_TRUE(queue.get_many(8, a_moment()).empty());
    EXPECT_EQ(queue.lost().items, 4u);
  });
  expect_nothing_held();
  fill();
  without_memory([&] {
    EXPECT_THROW(queue.get(soon()), std::runtime_error);
    EXPECT_EQ(queue.lost().items, 5u);
  });
  EXPECT_EQ(queue.get_many(8, soon()).size(), 3u);
}

// --- Names --------------------------------------------------------------------------------------

std::string path_of(const std::string& name) {
  return concat(std::getenv("CONVOY_SHARE_FOLDER"), "/convoy-", ::geteuid(), "/n-", name);
}

// As what a process leaves that is killed.
void leave_stale_name(const std::string& path) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
}

// Several sweep and offer the same name: one gets it, and it stays.
TEST_F(QueueLifeTest, ASweepLeavesNewNamesAlone) {
  constexpr int kThreads = 4;
  const Event keeps_the_folder = Event::create();
  offer(keeps_the_folder, "folder");
  for (int round = 0; round < 300; ++round) {
    leave_stale_name(path_of("jobs"));
    std::array<Event, kThreads> events;
    std::atomic<int> ready{0}, winners{0};
    {
      std::vector<std::jthread> threads;
      for (Event& event : events) {
        event = Event::create();
        threads.emplace_back([&] {
          ++ready;
          while (ready < kThreads) std::this_thread::yield();
          try {
            offer(event, "jobs");
            ++winners;
          } catch (const Error& error) {
            EXPECT_THAT(error.what(), testing::HasSubstr("taken"));
          }
        });
      }
    }
    ASSERT_EQ(winners, 1) << "round " << round;
    ASSERT_THAT(files("n-"), testing::Contains("n-jobs")) << "round " << round;
  }
}

// Somebody has the name and does not answer: open() keeps its deadline, and tells who.
TEST_F(QueueLifeTest, ASilentOffer) {
  const Event keeps_the_folder = Event::create();
  offer(keeps_the_folder, "folder");
  const std::string path = path_of("silent");
  const auto slash = path.rfind('/');
  const Listener silent(path.substr(0, slash), path.substr(slash + 1));
  expect_error(ErrorKind::kTimeout, concat("pid ", ::getpid(), " offers 'silent'"),
               [&] { open("silent", a_moment()); });
}

// Without a descriptor for who connects the offer waits, and does not keep a core busy.
TEST_F(QueueLifeTest, AnOfferWithoutDescriptors) {
  const Event event = Event::create();
  offer(event, "event");
  UniqueFd client(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = path_of("event");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{.rlim_cur = 3, .rlim_max = before.rlim_max};
  testing::internal::CaptureStderr();
  ::setrlimit(RLIMIT_NOFILE, &none);
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
            0);
  pollfd answer{client.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&answer, 1, 150), 0);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(::poll(&answer, 1, 30'000), 1);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_LE(std::count(log.begin(), log.end(), '\n'), 3) << log.substr(0, 1000);
  EXPECT_TRUE(Event(open("event", soon())) == event);
}

}  // namespace
}  // namespace convoy::share::test
